"""llama.cpp's own server as the xllamacpp wheel has it, with the flags that `bench/serve.py` gives.

    pip install xllamacpp gguf
    python bench/serve.py --llama-server bench/xllamacpp_server.py

For machines where llama.cpp is neither packaged nor built. HTTP, batching and the model are
llama.cpp's C++; Python starts it and sleeps.
"""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    """Serve a GGUF file until a signal."""
    made = argparse.ArgumentParser(description="llama.cpp's server from the xllamacpp wheel")
    made.add_argument("-m", dest="model", required=True, help="a GGUF file")
    made.add_argument("--port", type=int, required=True)
    made.add_argument("-np", dest="slots", type=int, default=1, help="answers side by side")
    made.add_argument("-c", dest="context", type=int, default=4096, help="tokens of all slots")
    made.add_argument("-t", dest="threads", type=int, default=1)
    made.add_argument("-tb", dest="batch_threads", type=int, default=1)
    made.add_argument("--threads-http", type=int, default=4)
    made.add_argument("--jinja", action="store_true")
    options = made.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel, params.n_ctx = options.slots, options.context
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.batch_threads
    params.n_threads_http = options.threads_http
    params.use_jinja = options.jinja
    params.verbosity = -1
    params.ui = False
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
