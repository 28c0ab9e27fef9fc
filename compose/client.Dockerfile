# The client of loadgen, for one machine or for each machine of a Ray cluster. From the checkout:
#
#   docker build --file compose/client.Dockerfile --tag llm-dissect-client .
#
# BASE is a Debian with Python 3.11 or newer as python3. pip takes its settings from there, or from --build-arg PIP_....
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# KubeRay asks Ray's health with wget, which the slim images of Python lack.
RUN command -v wget || { apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*; }

# ray[default] has the dashboard, which takes the job of a RayJob.
COPY . /src
RUN python3 -m venv /opt/llm-dissect \
    && /opt/llm-dissect/bin/pip install --no-cache-dir --disable-pip-version-check '/src[ray]' 'ray[default]' \
    && rm -rf /src

# KubeRay before 1.4 starts `bash -l`, whose PATH has no /opt.
RUN for name in ray loadgen training_probe; do ln -s /opt/llm-dissect/bin/$name /usr/local/bin/$name; done

RUN useradd --create-home --uid 1000 client
# By number: Kubernetes cannot tell from a name that it is not root.
USER 1000:1000
WORKDIR /home/client
ENV RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT ["loadgen"]
