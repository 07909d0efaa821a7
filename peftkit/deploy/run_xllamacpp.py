"""Serve a GGUF file with llama.cpp's bindings xllamacpp, like llama-server; a program by itself.

It runs in the environment of xllamacpp, not in peftkit's. Usage: run_xllamacpp.py -m FILE -c CONTEXT.
Prints the address of the server and serves until its standard input closes.
"""

import argparse
import sys


def main() -> None:
    import xllamacpp

    parser = argparse.ArgumentParser()
    parser.add_argument("-m", required=True)
    parser.add_argument("-c", type=int, required=True)
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = given.m, given.c, 1
    params.use_jinja, params.warmup, params.verbosity, params.port = True, False, 0, 0
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
