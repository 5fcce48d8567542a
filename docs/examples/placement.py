"""What --device-map auto would put where, for a model of the catalogue and memory that is free.

python placement.py MODEL TOKENS CPU [GPU ...]
"""

import sys

from llamatool.config.catalog import find
from llamatool.render.placement import placement_lines
from llamatool.sizing.fit import Load
from llamatool.sizing.placement import Device, place_layers
from llamatool.units import parse_bytes, parse_tokens

name, tokens, cpu, *gpus = sys.argv[1:]
devices = [Device(f"cuda:{number}", parse_bytes(free)) for number, free in enumerate(gpus)]
devices.append(Device("cpu", parse_bytes(cpu)))
made = place_layers(find(name).config, devices, Load(parse_tokens(tokens)))
print("\n".join(placement_lines(made)))
