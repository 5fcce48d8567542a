# What `make demo` shows: the main jobs on built-in models, with no download.
set -eu
bin=.venv/bin
run() { printf '\n$ llamatool %s\n' "$*"; "$bin/llamatool" "$@"; }
run inspect llama-3.1-8b
run inspect llama-3.1-8b llama-4-scout-instruct
run kv-budget --tokens 100000
run kv-budget llama-4-scout-instruct --tokens 1M
# Exit code 1 is the answer "no", which is no failure of the demo.
run kv-budget llama-3.1-8b --tokens 64k --gpu 24GiB || [ $? -eq 1 ]
run kv-budget llama-3.1-70b --tokens 100k --gpu 4xh100
# The built-in model of 1 M parameters finds facts far beyond the length it was trained on.
run needle --length 1k,16k --depths 5 --trials 1
# Two processes share it, as several GPUs would.
printf '\n$ torchrun --nproc-per-node 2 -m llamatool generate pocket --device cpu\n'
OMP_NUM_THREADS=1 "$bin/torchrun" --nproc-per-node 2 -m llamatool generate pocket --device cpu \
    </dev/null
