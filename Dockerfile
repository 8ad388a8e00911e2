# One image for every role: a lean CPU image on Debian 12, everything in /opt/swarmnode, run as the user `swarm`.
#
# Build: make image        (fills build/wheelhouse/ first; the build itself asks no Python package index)
# Run:   docker run --rm swarmnode:local --help, or docker-compose.yml for a whole swarm

FROM debian:bookworm-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgmp-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# The pattern lets the build go on without a wheelhouse, up to the line that says how to make one.
COPY pyproject.toml build/wheelhous[e] /wheelhouse/
RUN ls /wheelhouse/torch-*.whl >/dev/null 2>&1 \
    || { echo "build/wheelhouse/ is not there: run scripts/wheelhouse.sh (or build with: make image)" >&2; exit 1; }
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Dependencies come before the source, so that a change of code does not install torch again. The
# headers and test programs of torch are left out: nothing at run time needs them.
RUN python3 -m venv /opt/swarmnode \
    && /opt/swarmnode/bin/pip install --quiet --upgrade pip \
    && /opt/swarmnode/bin/python -c 'import tomllib; print("\n".join(tomllib.load(open("/wheelhouse/pyproject.toml", "rb"))["project"]["dependencies"]))' >requirements.txt \
    && /opt/swarmnode/bin/pip install --quiet --requirement requirements.txt \
    && cd /opt/swarmnode/lib/python3.11/site-packages \
    && rm -rf torch/include torch/share/cmake torch/bin/*test* torch/bin/*Test
COPY pyproject.toml README.md LICENSE ./
COPY protocol ./protocol
COPY peers ./peers
COPY trainer ./trainer
COPY swarmnode ./swarmnode
RUN /opt/swarmnode/bin/pip install --quiet --no-deps . \
    && /opt/swarmnode/bin/pip uninstall --quiet --yes pip

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libgmp10 tini ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /data --shell /usr/sbin/nologin swarm \
    && install -d -o swarm -g swarm -m 0700 /data \
    && install -d -o swarm -g swarm -m 0750 /invite
COPY --from=build /opt/swarmnode /opt/swarmnode
# A node is several processes that share the machine's cores: one thread each unless its owner says otherwise.
ENV PATH=/opt/swarmnode/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_DISABLE_TELEMETRY=1
USER swarm
WORKDIR /data
# Identity, policies, checkpoints and the ledger. The directory /invite is where the nodes of one host hand on an invite.
VOLUME /data
EXPOSE 4001 8642
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/healthz', timeout=4)"]
ENTRYPOINT ["tini", "--", "swarmnode"]
CMD ["--help"]
