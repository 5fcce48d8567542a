# Completion of llamatool for bash. Written by tools/make_completions.py; do not edit.

_llamatool() {
    # bash splits --name=value at the sign: it arrives as three words.
    local cur prev word command="" options="" valued="" i position=0 only_arguments=""
    local IFS=$' \t\n'
    local models="llama-1-7b llama-1-13b llama-1-30b llama-1-65b llama-2-7b llama-2-7b-chat llama-2-13b llama-2-13b-chat llama-2-70b llama-2-70b-chat codellama-7b codellama-7b-python codellama-7b-instruct codellama-13b codellama-13b-python codellama-13b-instruct codellama-34b codellama-34b-python codellama-34b-instruct codellama-70b codellama-70b-python codellama-70b-instruct llama-3-8b llama-3-8b-instruct llama-3-70b llama-3-70b-instruct llama-3.1-8b llama-3.1-8b-instruct llama-3.1-70b llama-3.1-70b-instruct llama-3.1-405b llama-3.1-405b-instruct llama-3.1-405b-fp8 llama-3.1-405b-instruct-fp8 llama-3.1-405b-mp16 llama-3.2-1b llama-3.2-1b-instruct llama-3.2-1b-instruct-qlora-int4 llama-3.2-1b-instruct-spinquant-int4 llama-3.2-3b llama-3.2-3b-instruct llama-3.2-3b-instruct-qlora-int4 llama-3.2-3b-instruct-spinquant-int4 llama-3.2-11b-vision llama-3.2-11b-vision-instruct llama-3.2-90b-vision llama-3.2-90b-vision-instruct llama-3.3-70b-instruct llama-4-scout-17b-16e llama-4-scout-17b-16e-instruct llama-4-maverick-17b-128e llama-4-maverick-17b-128e-instruct llama-guard-1-7b llama-guard-2-8b llama-guard-3-8b llama-guard-3-1b llama-guard-3-1b-int4 llama-guard-3-11b-vision llama-guard-4-12b"
    COMPREPLY=()
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=""
    if ((COMP_CWORD > 0)); then prev=${COMP_WORDS[COMP_CWORD - 1]}; fi
    if [[ $cur == "=" ]]; then
        cur=""
    elif [[ $prev == "=" ]] && ((COMP_CWORD > 1)); then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi

    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ -z $command ]]; then
            case $word in
                inspect)
                    options="--tokens --json -h --help"
                    valued="--tokens"
                    ;;
                kv-budget)
                    options="-n --tokens --batch --concurrency --images --document --kv-dtype --weights --as --gpu --memory --tp --utilization --overhead --max-batched-tokens --policy --curve --plot --json -h --help"
                    valued="-n --tokens --batch --concurrency --images --document --kv-dtype --weights --as --gpu --memory --tp --utilization --overhead --max-batched-tokens --policy --plot"
                    ;;
                tokens)
                    options="-t --tokenizer --config --corpus --lang --reference --count --per-line --show --ids --special --bos --no-bos --nfc --text --to --plot --csv --json -h --help"
                    valued="-t --tokenizer --config --corpus --lang --reference --special --text --to --plot"
                    ;;
                generate)
                    options="--prompt-file --image --system --suffix --chat --raw --template --tokenizer -n --max-new-tokens --beyond-context --stop -t --temperature --top-p --top-k --min-p --repetition-penalty --seed --device --device-map --dtype --quantize --compile --prompts --out --batch-size --stats --ids --json -h --help"
                    valued="--prompt-file --image --system --suffix --template --tokenizer -n --max-new-tokens --stop -t --temperature --top-p --top-k --min-p --repetition-penalty --seed --device --device-map --dtype --quantize --prompts --out --batch-size"
                    ;;
                needle)
                    options="--length --depths --depth-scale --trials --mode --needle --question --answer --answer-prefix --value --keys --distractors --needles --haystack --repeat --language --straddle --score --max-new --template --control --no-control --budget --plan --out --fresh --show --device --device-map --dtype --prefill-chunk --rope-factor --threshold --lower-bound --fail-under --seed --palette --plain --json -h --help"
                    valued="--length --depths --depth-scale --trials --mode --needle --question --answer --answer-prefix --value --keys --distractors --needles --haystack --language --score --max-new --template --budget --out --show --device --device-map --dtype --prefill-chunk --rope-factor --threshold --fail-under --seed --palette"
                    ;;
                convert)
                    options="--to --mp --shard-size --dtype --instruct --base --model --tokenizer --no-tokenizer --params-style --keep-replicated-kv --strict-replicas --verify-input --dry-run --verify --resume --overwrite --threads --max-memory --json -q --quiet -h --help"
                    valued="--to --mp --shard-size --dtype --model --tokenizer --params-style --verify --threads --max-memory"
                    ;;
                verify)
                    options="--logits --json -q --quiet -h --help"
                    valued=""
                    ;;
                models)
                    options="--json -h --help"
                    valued=""
                    ;;
                completion)
                    options="-h --help"
                    valued=""
                    ;;
                *) continue ;;
            esac
            command=$word
        elif [[ -n $only_arguments ]]; then
            ((position++))
        elif [[ $word == "--" ]]; then
            only_arguments=yes
        elif [[ $word == -?* ]]; then
            if [[ " $valued " == *" $word "* ]]; then
                ((i++)) # its value
                if [[ ${COMP_WORDS[i]} == "=" ]]; then ((i++)); fi
            fi
        elif [[ $word != "=" ]]; then
            ((position++))
        fi
    done

    if [[ -z $command ]]; then
        COMPREPLY=($(compgen -W "inspect kv-budget tokens generate needle convert verify models completion --version -h --help" -- "$cur"))
        return
    fi

    if [[ -z $only_arguments ]]; then
        case $command:$prev in
            inspect:--tokens)
                :
                return
                ;;
            kv-budget:-n | kv-budget:--tokens | kv-budget:--batch | kv-budget:--concurrency | kv-budget:--images | kv-budget:--memory | kv-budget:--tp | kv-budget:--utilization | kv-budget:--overhead | kv-budget:--max-batched-tokens)
                :
                return
                ;;
            kv-budget:--document | kv-budget:--plot)
                _llamatool_offer "$cur" "" file
                return
                ;;
            kv-budget:--kv-dtype)
                _llamatool_offer "$cur" "bfloat16 float16 float32 fp8 int8 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl"
                return
                ;;
            kv-budget:--weights)
                _llamatool_offer "$cur" "bfloat16 fp8 int8 int4 q8_0 q6_k q5_k q4_k q4_0"
                return
                ;;
            kv-budget:--as)
                _llamatool_offer "$cur" "mha mqa"
                return
                ;;
            kv-budget:--gpu)
                _llamatool_offer "$cur" "rtx-4060-ti-16gb rtx-4080 rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada t4 l4 a10 a40 l40s a100-40gb a100-80gb h100-pcie h100 h100-nvl h200 b200 mi300x mi325x m2-ultra-64 m2-ultra-128 m2-ultra-192 m3-ultra-96 m3-ultra-256 m3-ultra-512 m4-16 m4-24 m4-32 m4-pro-24 m4-pro-48 m4-pro-64 m4-max-48 m4-max-64 m4-max-128 smallest"
                return
                ;;
            kv-budget:--policy)
                _llamatool_offer "$cur" "capped live_chunk_only no_eviction vllm_hybrid"
                return
                ;;
            tokens:-t | tokens:--tokenizer)
                _llamatool_offer "$cur" "llama2 llama3 llama4" file
                return
                ;;
            tokens:--config)
                _llamatool_offer "$cur" "$models" file
                return
                ;;
            tokens:--corpus)
                _llamatool_offer "$cur" "builtin" folder
                return
                ;;
            tokens:--lang | tokens:--reference)
                _llamatool_offer "$cur" "en de fr es pt tr vi ru ar hi zh-Hans zh-Hant ja ko"
                return
                ;;
            tokens:--special)
                _llamatool_offer "$cur" "none all"
                return
                ;;
            tokens:--text | tokens:--plot)
                _llamatool_offer "$cur" "" file
                return
                ;;
            tokens:--to)
                _llamatool_offer "$cur" "json tiktoken spm"
                return
                ;;
            generate:--prompt-file | generate:--image | generate:--tokenizer | generate:--prompts | generate:--out)
                _llamatool_offer "$cur" "" file
                return
                ;;
            generate:--system | generate:--suffix | generate:-n | generate:--max-new-tokens | generate:--stop | generate:-t | generate:--temperature | generate:--top-p | generate:--top-k | generate:--min-p | generate:--repetition-penalty | generate:--seed | generate:--batch-size)
                :
                return
                ;;
            generate:--template)
                _llamatool_offer "$cur" "llama-2 codellama-70b llama-3 llama-4" file
                return
                ;;
            generate:--device)
                _llamatool_offer "$cur" "auto cpu cuda mps"
                return
                ;;
            generate:--device-map)
                _llamatool_offer "$cur" "auto"
                return
                ;;
            generate:--dtype)
                _llamatool_offer "$cur" "bfloat16 float16 float32"
                return
                ;;
            generate:--quantize)
                _llamatool_offer "$cur" "int8"
                return
                ;;
            needle:--length | needle:--depths | needle:--trials | needle:--needle | needle:--question | needle:--answer | needle:--answer-prefix | needle:--value | needle:--distractors | needle:--needles | needle:--max-new | needle:--budget | needle:--show | needle:--prefill-chunk | needle:--rope-factor | needle:--threshold | needle:--fail-under | needle:--seed)
                :
                return
                ;;
            needle:--depth-scale)
                _llamatool_offer "$cur" "linear sigmoid"
                return
                ;;
            needle:--mode)
                _llamatool_offer "$cur" "single packed sweep"
                return
                ;;
            needle:--keys)
                _llamatool_offer "$cur" "words names cities"
                return
                ;;
            needle:--haystack)
                _llamatool_offer "$cur" "grammar" file
                return
                ;;
            needle:--language)
                _llamatool_offer "$cur" "en zh"
                return
                ;;
            needle:--score)
                _llamatool_offer "$cur" "forced generate both"
                return
                ;;
            needle:--template)
                _llamatool_offer "$cur" "auto raw chat"
                return
                ;;
            needle:--out)
                _llamatool_offer "$cur" "" folder
                return
                ;;
            needle:--device)
                _llamatool_offer "$cur" "auto cpu cuda mps"
                return
                ;;
            needle:--device-map)
                _llamatool_offer "$cur" "auto"
                return
                ;;
            needle:--dtype)
                _llamatool_offer "$cur" "auto bf16 fp16 fp32"
                return
                ;;
            needle:--palette)
                _llamatool_offer "$cur" "cividis classic"
                return
                ;;
            convert:--to)
                _llamatool_offer "$cur" "hf meta"
                return
                ;;
            convert:--mp | convert:--shard-size | convert:--threads | convert:--max-memory)
                :
                return
                ;;
            convert:--dtype)
                _llamatool_offer "$cur" "keep bf16 fp16 fp32"
                return
                ;;
            convert:--model)
                _llamatool_offer "$cur" "$models"
                return
                ;;
            convert:--tokenizer)
                _llamatool_offer "$cur" "" file
                return
                ;;
            convert:--params-style)
                _llamatool_offer "$cur" "actual original"
                return
                ;;
            convert:--verify)
                _llamatool_offer "$cur" "none size hash full"
                return
                ;;
        esac
        if [[ $cur == -* ]]; then
            COMPREPLY=($(compgen -W "$options" -- "$cur"))
            return
        fi
    fi

    case $command:$position in
        inspect:*) _llamatool_offer "$cur" "$models" file ;;
        kv-budget:*) _llamatool_offer "$cur" "$models" file ;;
        tokens:*) _llamatool_offer "$cur" "" file ;;
        generate:0) _llamatool_offer "$cur" "" file ;;
        generate:1) : ;;
        needle:*) _llamatool_offer "$cur" "pocket pocket-rope" file ;;
        convert:0) _llamatool_offer "$cur" "" file ;;
        convert:1) _llamatool_offer "$cur" "" folder ;;
        verify:0) _llamatool_offer "$cur" "" file ;;
        verify:1) _llamatool_offer "$cur" "" file ;;
        models:*) : ;;
        completion:0) _llamatool_offer "$cur" "bash zsh fish" ;;
        *) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
    esac
}

# One of some words; with a third argument, or a file or folder.
_llamatool_offer() {
    local IFS=$' \t\n'
    COMPREPLY=($(compgen -W "$2" -- "$1"))
    if [[ -n ${3-} ]]; then
        if ((${#COMPREPLY[@]})); then
            IFS=$'\n'
            if [[ $3 == folder ]]; then
                COMPREPLY+=($(compgen -d -- "$1"))
            else
                COMPREPLY+=($(compgen -f -- "$1"))
            fi
            compopt -o filenames 2>/dev/null
        elif [[ $3 == folder ]]; then
            compopt -o dirnames 2>/dev/null
        else # the shell completes file names itself, quotes and all
            compopt -o default 2>/dev/null
        fi
    fi
}

if type compopt >/dev/null 2>&1; then
    complete -F _llamatool llamatool
else # bash 3 has no way to say it later
    complete -o default -F _llamatool llamatool
fi
