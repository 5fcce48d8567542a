# What `make demo` shows: the main jobs on built-in models, with no download.
set -eu
bin=.venv/bin
run() { printf '\n$ llamatool %s\n' "$*"; "$bin/llamatool" "$@"; }
run inspect llama-3.1-8b
run inspect llama-3.1-8b llama-4-scout-instruct
