# peftkit in a container; runs and data lie in the folder that is mounted at /work.
#
#   docker build -t peftkit .
#   docker run --rm -v "$PWD:/work" peftkit train recipe.yaml
#
# BASE is an image with Python 3.10 or newer: python:3.12-slim, or one with CUDA and a C++ compiler for
# machines with an NVIDIA GPU (docker run --gpus all). TORCH_INDEX is the package index torch is taken
# from: PyTorch's CPU index makes a small image; left empty, pip takes the wheel with CUDA libraries.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_INDEX=
ARG EXTRAS=gguf,images,json,serve
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface PEFTKIT_CACHE=/cache/peftkit

WORKDIR /src
COPY constraints.txt ./
RUN python3 -m pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY peftkit peftkit
COPY cli cli
COPY recipes recipes
RUN python3 -m pip install -c constraints.txt ".[$EXTRAS]" && peftkit --version \
    && useradd --create-home peftkit && mkdir -p /work /cache && chown peftkit /work /cache

USER peftkit
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["peftkit"]
CMD ["--help"]
