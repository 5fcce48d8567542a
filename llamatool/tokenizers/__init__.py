"""Text to ids and back, exactly as the reference libraries do it.

load.py      a tokenizer from a file, a folder, bytes, or a GGUF's metadata
base.py      the interface of every tokenizer; the rest of the program needs only these two
detect.py    what a file is, by its content           special.py   Meta's control tokens
chunks.py    where a text can be cut                  texts.py     reading text, noting oddities
tiktoken.py, sentencepiece.py, huggingface.py         one for each library that encodes
gguf.py, modelproto.py, bytelevel.py                  the vocabularies inside the files
convert.py, export.py, verify.py                      files of another form, and the check
compare.py, corpus/, estimate.py, find.py             what `llamatool tokens` shows
"""
