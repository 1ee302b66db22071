# kvtier in a container. Targets: `plain`, without torch, for daemons and routers; `cpu` (the default) and `cuda` for engines.
#
#   docker build --target plain --tag kvtier:0.2.0 .
#   docker build --target cpu   --tag kvtier-cpu:0.2.0   .
#   docker build --target cuda  --tag kvtier-cuda:0.2.0  .
#
# torch is chosen as the Makefile does, by the same script: the CPU build where the package index offers one. PyTorch's own
# index does: --build-arg PIP_EXTRA_INDEX_URL=… . On CUDA its wheels bring CUDA's libraries along, so that both targets
# stand on the same image and the driver is the host's.

FROM python:3.12.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1


# One environment for each target, torch first and alone: what comes after leaves it as it is.
FROM base AS sources
WORKDIR /src
COPY .ci/venv-with-torch .ci/debian-package .ci/
COPY hatch_build.py pyproject.toml README.md CHANGELOG.md LICENSE docker-compose.yml ./
COPY deploy deploy
COPY kvtier kvtier
COPY tiers tiers
COPY connector connector
COPY engine engine
COPY service service

# The wheel of kvtier has extension modules: no compiler comes into an image that runs.
RUN .ci/debian-package gcc gcc && .ci/debian-package '' libc6-dev
# What `kvtier --version` names: --build-arg BUILD_COMMIT="$(git rev-parse --short=12 HEAD)".
ARG BUILD_COMMIT
ENV BUILD_COMMIT=$BUILD_COMMIT

# What options of a configuration need is in every image: nothing can be installed in one that runs.
FROM sources AS build-plain
RUN python -m venv /opt/kvtier && /opt/kvtier/bin/pip install ".[compression,encryption,objects,peers,tracing]"

FROM sources AS build-cpu
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
RUN .ci/venv-with-torch /opt/kvtier "$TORCH" >constraints.txt \
    && /opt/kvtier/bin/pip install --constraint constraints.txt ".[compression,encryption,engine,objects,peers,tracing]"

FROM sources AS build-cuda
ARG TORCH=torch
ARG PIP_EXTRA_INDEX_URL
RUN .ci/venv-with-torch /opt/kvtier "$TORCH" >constraints.txt \
    && /opt/kvtier/bin/pip install --constraint constraints.txt ".[compression,cuda,encryption,engine,objects,peers,tracing]"


# What runs: no compiler, no package tool at work, nobody's account but one without a password or a shell. A volume mounted at
# one of the directories of /data for the first time takes over whose it is.
FROM base AS run
RUN groupadd --gid 10001 kvtier \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvtier \
    && install -d -o kvtier -g kvtier -m 0700 /data/model /data/slabs /data/run /data/events-a /data/events-b
COPY --chmod=0755 deploy/is-well /usr/local/bin/is-well
ENV PATH=/opt/kvtier/bin:$PATH HOME=/tmp
USER 10001:10001
ENTRYPOINT ["kvtier"]
CMD ["--help"]

FROM run AS plain
COPY --from=build-plain /opt/kvtier /opt/kvtier

FROM run AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/kvtier /opt/kvtier

FROM run AS cpu
COPY --from=build-cpu /opt/kvtier /opt/kvtier
