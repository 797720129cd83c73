"""Process of a llama.cpp server: prints its URL as JSON, exits when standard input is closed.

It has a process of its own because llama.cpp's threads spin and its server lives as long as the
process. The settings are its fastest ones here: prompt cache, continuous batching, one slot a
stream.
"""

from __future__ import annotations

import json
import os
import sys

from app.extras import how_to_install


def main() -> None:
    """Arguments: model file, threads, streams at once, positions a stream."""
    model_path, num_threads, num_streams, max_context = sys.argv[1:]
    try:
        import xllamacpp  # of the extra `bench`
    except ImportError:
        print(json.dumps({"error": f"xllamacpp is not installed; {how_to_install('bench')}"}))
        return
    params = xllamacpp.CommonParams()
    params.model.path = model_path
    params.cpuparams.n_threads = int(num_threads)
    params.cpuparams_batch.n_threads = int(num_threads)
    params.n_parallel = int(num_streams)
    params.n_ctx = int(num_streams) * int(max_context)
    params.n_predict = -1
    params.use_jinja = True
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()
    # Its threads would keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
