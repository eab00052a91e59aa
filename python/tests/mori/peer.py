"""Serves its buffer until its input ends; tells its bytes when asked for a range of them, and all of
them as soon as it has deregistered them."""

import json
import sys

from conftest import Buffer, engine

mine = engine(sys.argv[1])
buffer = Buffer(2)
memory = buffer.register(mine)
hello = {"engine": mine.get_engine_desc().pack().hex(), "memory": memory.pack().hex()}
print(json.dumps(hello), flush=True)
for line in sys.stdin:
    start, end = 0, buffer.size
    if line.strip() == "deregister":
        mine.deregister_memory(memory)
    else:
        start, end = map(int, line.split())
    print(buffer.memory[start:end].hex(), flush=True)
