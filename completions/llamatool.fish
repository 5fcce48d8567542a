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

# models
complete -c llamatool -n '__fish_seen_subcommand_from models' -l json -d 'Print one JSON object'
complete -c llamatool -n '__fish_seen_subcommand_from models' -s h -l help -d 'Show this message and exit'

# completion
complete -c llamatool -n '__fish_seen_subcommand_from completion' -s h -l help -d 'Show this message and exit'
complete -c llamatool -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'
