"""The command line: parse arguments, call one function, hand its result to render/."""
