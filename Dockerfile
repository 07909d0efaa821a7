# peftkit in a container; runs and data lie in the folder that is mounted at /work.
#
#   docker build -t peftkit .
#   docker run --rm -v "$PWD:/work" peftkit train recipe.yaml
#
# BASE is an image with Python 3.11 or newer: python:3.12-slim, which is enough for NVIDIA GPUs too
# (docker run --gpus all): torch's wheel brings the CUDA libraries. TORCH_INDEX is the package index torch
# is taken from: PyTorch's CPU index makes a small image; left empty, pip takes the wheel with CUDA.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_INDEX=
ARG EXTRAS=gguf,images,json,metrics,s3
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface PEFTKIT_CACHE=/cache/peftkit

# Triton compiles a helper with gcc and Python.h when a kernel is first launched, torch.compile on a CPU
# needs g++; slim images have neither. The last line compiles as Triton does, so that the build fails here
# and not the first step of training.
RUN if command -v apt-get; then \
        apt-get update && apt-get install -y --no-install-recommends g++ \
        && { test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
            || apt-get install -y --no-install-recommends python3-dev; } \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && echo '#include <Python.h>' > /tmp/helper.c \
    && gcc -shared -fPIC -o /tmp/helper.so /tmp/helper.c \
        "-I$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && rm /tmp/helper.c /tmp/helper.so

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
