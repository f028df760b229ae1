# An image that runs `thermopile`, not as root: `make image` for CPUs, `make image DEVICE=cuda` with CUDA and DALI.
# `make image` passes the base by the digest that the registry gives for it at that moment.
ARG BASE=debian:12-slim

FROM $BASE AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ libturbojpeg0-dev pkg-config python3-dev python3-venv
WORKDIR /source
# What changes least comes first, so that a change of the sources repeats only the last step.
COPY setup setup
RUN python3 -m venv /opt/thermopile \
 && /opt/thermopile/bin/python setup/ffcv_wheel.py dist
COPY constraints.txt .
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cpu ]; then cpu="--extra-index-url https://download.pytorch.org/whl/cpu"; fi \
 && /opt/thermopile/bin/pip install --no-cache-dir --constraint constraints.txt $cpu torch
COPY . .
RUN if [ "$DEVICE" = cuda ]; then extra="[gpu]"; fi \
 && /opt/thermopile/bin/pip install --no-cache-dir --constraint constraints.txt --find-links dist ".$extra"

FROM $BASE
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home thermopile \
 && install --directory --owner thermopile /work
COPY --from=build /opt/thermopile /opt/thermopile
ENV PATH=/opt/thermopile/bin:$PATH
USER thermopile
WORKDIR /work
ENTRYPOINT ["thermopile"]
CMD ["--help"]
