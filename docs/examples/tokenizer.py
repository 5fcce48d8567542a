from pathlib import Path

from llamatool.tokenizers.load import load

tokenizer = load(Path("tokenizer.model"))
ids = tokenizer.encode("hi there")
print(tokenizer.identity.title, tokenizer.vocab_size, ids)
print(tokenizer.special_ids["<|eot_id|>"], tokenizer.eos_ids)
stream = tokenizer.stream()
print([stream.feed(i) for i in ids] + [stream.finish()])
