"""Serve a GGUF file with llama.cpp's bindings xllamacpp, like llama-server; a program by itself.

It runs in the environment of xllamacpp, not in peftkit's, until it is terminated or its
standard input closes, which happens if peftkit is killed.
"""

import argparse
import sys


def main() -> None:
    """Parse the arguments that llama-server has, and serve."""
    import xllamacpp

    parser = argparse.ArgumentParser()
    parser.add_argument("-m", required=True)
    parser.add_argument("-c", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-t", type=int, required=True)
    parser.add_argument("--jinja", action="store_true")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port = given.m, given.c, given.port
    params.n_parallel, params.use_jinja = 1, given.jinja
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.t
    params.warmup, params.verbosity = False, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
