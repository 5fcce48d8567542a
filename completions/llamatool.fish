# Completion of llamatool for fish. Written by tools/make_completions.py; do not edit.

function __llamatool_models
    echo llama-1-7b
    echo llama-1-13b
    echo llama-1-30b
    echo llama-1-65b
    echo llama-2-7b
    echo llama-2-7b-chat
    echo llama-2-13b
    echo llama-2-13b-chat
    echo llama-2-70b
    echo llama-2-70b-chat
    echo codellama-7b
    echo codellama-7b-python
    echo codellama-7b-instruct
    echo codellama-13b
    echo codellama-13b-python
    echo codellama-13b-instruct
    echo codellama-34b
    echo codellama-34b-python
    echo codellama-34b-instruct
    echo codellama-70b
    echo codellama-70b-python
    echo codellama-70b-instruct
    echo llama-3-8b
    echo llama-3-8b-instruct
    echo llama-3-70b
    echo llama-3-70b-instruct
    echo llama-3.1-8b
    echo llama-3.1-8b-instruct
    echo llama-3.1-70b
    echo llama-3.1-70b-instruct
    echo llama-3.1-405b
    echo llama-3.1-405b-instruct
    echo llama-3.1-405b-fp8
    echo llama-3.1-405b-instruct-fp8
    echo llama-3.1-405b-mp16
    echo llama-3.2-1b
    echo llama-3.2-1b-instruct
    echo llama-3.2-1b-instruct-qlora-int4
    echo llama-3.2-1b-instruct-spinquant-int4
    echo llama-3.2-3b
    echo llama-3.2-3b-instruct
    echo llama-3.2-3b-instruct-qlora-int4
    echo llama-3.2-3b-instruct-spinquant-int4
    echo llama-3.2-11b-vision
    echo llama-3.2-11b-vision-instruct
    echo llama-3.2-90b-vision
    echo llama-3.2-90b-vision-instruct
    echo llama-3.3-70b-instruct
    echo llama-4-scout-17b-16e
    echo llama-4-scout-17b-16e-instruct
    echo llama-4-maverick-17b-128e
    echo llama-4-maverick-17b-128e-instruct
    echo llama-guard-1-7b
    echo llama-guard-2-8b
    echo llama-guard-3-8b
    echo llama-guard-3-1b
    echo llama-guard-3-1b-int4
    echo llama-guard-3-11b-vision
    echo llama-guard-4-12b
end

# Files only where a command reads or writes them.
complete -c llamatool -f
complete -c llamatool -n __fish_use_subcommand -l version -d 'Print the version'
complete -c llamatool -n __fish_use_subcommand -s h -l help -d 'Show this message and exit'
complete -c llamatool -n __fish_use_subcommand -a inspect -d 'Say which Llama this is, how large, what is odd about it, and what its licence asks'
complete -c llamatool -n __fish_use_subcommand -a kv-budget -d 'Say what the KV cache costs, whether it fits, and how many tokens and users would'
complete -c llamatool -n __fish_use_subcommand -a tokens -d 'Count the tokens of texts, exactly, and compare tokenizers and languages'
complete -c llamatool -n __fish_use_subcommand -a generate -d 'Run a model and write what it says, as it says it'
complete -c llamatool -n __fish_use_subcommand -a needle -d 'Test whether a model finds a fact at every depth of a long context'
complete -c llamatool -n __fish_use_subcommand -a convert -d 'Convert a checkpoint between Meta\'s layout and Hugging Face\'s, or from GGUF, and prove it'
complete -c llamatool -n __fish_use_subcommand -a verify -d 'Compare two checkpoints tensor by tensor, in any two layouts, in bounded memory'
complete -c llamatool -n __fish_use_subcommand -a models -d 'List the published models with their main figures'
complete -c llamatool -n __fish_use_subcommand -a completion -d 'Print the completion file of a shell; none of your own files is touched'

# inspect
complete -c llamatool -n '__fish_seen_subcommand_from inspect' -l tokens -x -d 'Length of a document in tokens'
complete -c llamatool -n '__fish_seen_subcommand_from inspect' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from inspect' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from inspect' -F
complete -c llamatool -n '__fish_seen_subcommand_from inspect' -a '(__llamatool_models)' -d 'built-in model'

# kv-budget
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -s n -l tokens -x -d 'Tokens of one sequence, 8,192 if not said'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l batch -l concurrency -x -d 'Sequences at once'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l images -x -d 'Images in each sequence'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l document -r -F -d 'A text file whose tokens are asked about, instead of --tokens'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l kv-dtype -x -a 'bfloat16 float16 float32 fp8 int8 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl' -d 'Of the cache: bfloat16, float16, float32, fp8, int8, q8_0, q4_0'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l weights -x -a 'bfloat16 fp8 int8 int4 q8_0 q6_k q5_k q4_k q4_0' -d 'Of all weights: bfloat16, fp8, int8, int4, q4_k, ...; else as the file says'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l as -x -a 'mha mqa' -d 'What if the model had other KV heads?'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l gpu -x -a 'rtx-4060-ti-16gb rtx-4080 rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada t4 l4 a10 a40 l40s a100-40gb a100-80gb h100-pcie h100 h100-nvl h200 b200 mi300x mi325x m2-ultra-64 m2-ultra-128 m2-ultra-192 m3-ultra-96 m3-ultra-256 m3-ultra-512 m4-16 m4-24 m4-32 m4-pro-24 m4-pro-48 m4-pro-64 m4-max-48 m4-max-64 m4-max-128 smallest' -d 'Fit on h100, 2xh100, 2x24GiB, m4-max-128, ...; `smallest` searches the table'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l memory -x -d 'Memory of one device'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l tp -x -d 'Devices that share the model by tensor parallelism, if --gpu gives no count'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l utilization -x -d 'Usable share of the memory; 0.9, and 0.75 of unified memory, if not said'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l overhead -x -d 'All but weights and cache; if not said, 512MiB and estimated activations'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l max-batched-tokens -x -d 'Tokens of one prefill step, 8,192 if not said'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l policy -x -a 'capped live_chunk_only no_eviction vllm_hybrid' -d 'What the engine keeps of chunked and sliding layers, for the fit: capped, no_eviction or vllm_hybrid'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l curve -d 'A table and a plot over the context length'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l plot -r -F -d 'Write the curve as an SVG file'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -F
complete -c llamatool -n '__fish_seen_subcommand_from kv-budget' -a '(__llamatool_models)' -d 'built-in model'

# tokens
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -s t -l tokenizer -r -F -a 'llama2 llama3 llama4' -d 'tokenizer.model, tokenizer.json, .gguf, a model\'s folder, a hub id, or llama2, llama3, llama4, pocket'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l config -r -F -a '(__llamatool_models)' -d 'A model: context, KV cache, and whether the tokenizer is its own'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l corpus -x -a 'builtin (__fish_complete_directories)' -d 'Without TEXT: the texts to compare languages with; DIR has one .txt or .html file for each language'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l lang -x -a 'en de fr es pt tr vi ru ar hi zh-Hans zh-Hant ja ko' -d 'Of the corpus, only these: en,vi,ja'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l reference -x -a 'en de fr es pt tr vi ru ar hi zh-Hans zh-Hant ja ko' -d 'Language that premiums refer to'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l count -d 'Print one number'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l per-line -d 'Count every line as a text of its own'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l show -d 'Print the text with its token borders'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l ids -d 'Print the ids'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l special -x -a 'none all' -d 'Control tokens that the text may hold, as in <|eot_id|>,<|image|>'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l bos -l no-bos -d 'Count the token at the beginning of a prompt'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l nfc -d 'Compose the text first'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l text -r -F -d 'For verify: a text'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l to -x -a 'json tiktoken spm' -d 'For convert'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l plot -r -F -d 'Write bars as SVG'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l csv -d 'Print comma-separated values'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from tokens' -F

# generate
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l prompt-file -r -F -d 'A text file with the prompt'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l image -r -F -d 'A picture that stands before the prompt; repeatable'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l system -x -d 'A system text'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l suffix -x -d 'What follows the gap that Code Llama is to fill; PROMPT stands before it'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l chat -d 'Hold a conversation on the terminal'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l raw -d 'Give the prompt to the model as it is, behind BOS'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l template -r -F -a 'llama-2 codellama-70b llama-3 llama-4' -d 'A chat template, or a built-in format: llama-2, llama-3, llama-4, codellama-70b'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l tokenizer -r -F -d 'A tokenizer that is not beside the weights'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -s n -l max-new-tokens -x -d 'Tokens to write at most; 512, or what is left of the context, if not said'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l beyond-context -d 'Allow more tokens than the model\'s context'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l stop -x -d 'End before this text; repeatable'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -s t -l temperature -x -d '0: always the most likely token; if not said, as the model\'s files say'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l top-p -x -d 'Keep the most likely tokens up to this probability'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l top-k -x -d 'Keep the K most likely tokens; 0: all'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l min-p -x -d 'Keep tokens with at least this share of the highest probability'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l repetition-penalty -x -d 'Above 1: tokens seen before become less likely'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l seed -x -d 'Same seed, same text'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l device -x -a 'auto cpu cuda mps' -d 'auto, cpu, cuda, cuda:N or mps'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l device-map -x -a 'auto' -d 'Spread the layers over all GPUs here, and over the CPU what they have no room for'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l dtype -x -a 'bfloat16 float16 float32' -d 'bfloat16, float16 or float32; the checkpoint\'s if not said'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l quantize -x -a 'int8' -d 'Weights of one byte'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l compile -d 'Compile the decoding step'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l prompts -r -F -d 'Many prompts, one JSON object a line: prompt or messages, id, system'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l out -r -F -d 'The answers to --prompts, one JSON object a line; goes on where it ended'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l batch-size -x -d 'Prompts of equal length answered together'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l stats -d 'Write speed, memory and stop ids to standard error'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l ids -d 'Write prompt and answer as ids to standard error'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from generate' -F

# needle
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l length -x -d '64k; a list 1k,4k; a range 1k:64k:x2 or 8k:128k:+8k'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l depths -x -d 'Number of even depths, or a list in percent: 0,50,100'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l depth-scale -x -a 'linear sigmoid' -d 'sigmoid puts more depths near both ends'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l trials -x -d 'Per cell'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l mode -x -a 'single packed sweep' -d 'single: one needle per prompt; packed: a needle at every depth, one prefill per length; sweep: one prefill for all lengths'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l needle -x -d 'Own fact, with {key} and {value} where they vary'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l question -x -d 'Own question'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l answer -x -d 'Expected answer'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l answer-prefix -x -d 'How the answer begins, auto or none'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l value -x -d 'digits:N, word or uuid'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l keys -x -a 'words names cities' -d 'Kind of keys'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l distractors -x -d 'Needles with other keys in every prompt'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l needles -x -d 'In every prompt, each asked for: one at the depth of the cell, the others evenly over the rest'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l haystack -r -F -a 'grammar' -d 'Generated sentences, or own documents'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l repeat -d 'Repeat documents that are too short'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l language -x -a 'en zh' -d 'Of sentences and questions'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l straddle -d 'Also put needles across the borders of chunked layers'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l score -x -a 'forced generate both' -d 'forced: would it write the answer? generate: let it write'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l max-new -x -d 'Tokens of a written answer'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l template -x -a 'auto raw chat' -d 'auto: a chat model\'s own format, and raw text for base models'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l control -l no-control -d 'Also ask without the needle, with a wrong key, and in a short context'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l budget -x -d 'Stop after 10m, or after 2PF'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l plan -d 'Print tokens, FLOPs, memory and time; run nothing'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l out -x -a '(__fish_complete_directories)' -d 'Write results.jsonl, summary.json, grid.csv, grid.svg and report.html'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l fresh -d 'Do not go on from earlier results in DIR'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l show -x -d 'Print the prompt of a line of DIR\'s results.jsonl, built again'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l device -x -a 'auto cpu cuda mps' -d 'auto, cpu, cuda, cuda:1 or mps'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l device-map -x -a 'auto' -d 'Spread the layers over all GPUs here, and over the CPU what they have no room for'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l dtype -x -a 'auto bf16 fp16 fp32' -d 'auto: fp32 for small models on a CPU, else as stored'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l prefill-chunk -x -d 'Tokens read at once'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l rope-factor -x -d 'What if: another factor of RoPE scaling'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l threshold -x -d 'Of the effective length; default 0.85 of the score in a short context'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l lower-bound -d 'Compare the interval\'s lower end with the threshold'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l fail-under -x -d 'Exit code 1 if a length scores below'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l seed -x -d 'Of everything'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l palette -x -a 'cividis classic' -d 'classic: red, yellow, green'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l plain -d 'One character per cell, no colour'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from needle' -F
complete -c llamatool -n '__fish_seen_subcommand_from needle' -a 'pocket pocket-rope'

# convert
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l to -x -a 'hf meta' -d 'Layout to write; the other one if not said'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l mp -x -d 'Files of Meta\'s layout, one per model-parallel rank; as published if not said'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l shard-size -x -d 'Largest .safetensors file'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l dtype -x -a 'keep bf16 fp16 fp32' -d 'Type to write; keep changes no bit'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l instruct -l base -d 'Which of the two it is; else guessed from the file or the folder\'s name'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l model -x -a '(__llamatool_models)' -d 'The published model it is'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l tokenizer -r -F -d 'Its tokenizer, if not beside it'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l no-tokenizer -d 'Write no tokenizer files'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l params-style -x -a 'actual original' -d 'original: params.json says vocab_size -1, as Llama 2\'s does'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l keep-replicated-kv -d 'Keep heads that Meta\'s files hold twice'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l strict-replicas -d 'Refuse shards whose common tensors differ'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l verify-input -d 'Check the MD5 sums in checklist.chk first'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l dry-run -d 'Print the plan and write nothing'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l verify -x -a 'none size hash full' -d 'size: headers; hash: every piece read is found again; full: read both again'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l resume -d 'Finish an interrupted conversion'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l overwrite -d 'Replace an earlier conversion'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l threads -x -d 'As many as processors, up to 8'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l max-memory -x -d 'Memory for buffers'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -s q -l quiet -d 'No progress'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from convert' -F
complete -c llamatool -n '__fish_seen_subcommand_from convert' -a '(__fish_complete_directories)'

# verify
complete -c llamatool -n '__fish_seen_subcommand_from verify' -l logits -d 'Compare what they compute on random tokens, each in the convention of its own layout, one layer in memory at a time'
complete -c llamatool -n '__fish_seen_subcommand_from verify' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from verify' -s q -l quiet -d 'No progress'
complete -c llamatool -n '__fish_seen_subcommand_from verify' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from verify' -F
complete -c llamatool -n '__fish_seen_subcommand_from verify' -F

# models
complete -c llamatool -n '__fish_seen_subcommand_from models' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from models' -s h -l help -d 'Show this message and exit'

# completion
complete -c llamatool -n '__fish_seen_subcommand_from completion' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'
