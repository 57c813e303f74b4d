# The build stage compiles the hot modules to C. The image itself contains no compiler and no pip. It also contains the
# applications, for example genie-ledger.
#
# To pin the base image: docker build --build-arg BASE=python:3.12-slim@sha256:DIGEST .
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements.lock requirements-build.lock ./
COPY genie genie
COPY applications applications
ENV HATCH_BUILD_HOOK_ENABLE_MYPYC=true
# The dependencies, and the tools that build the wheel, are those of the lock files, and pip checks their hashes. Debug
# symbols, a third of /opt/genie, are removed.
RUN python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements-build.lock \
 && python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . ./applications/tokens ./applications/ledger \
 && python -m venv --without-pip /opt/genie \
 && python -m pip --python /opt/genie/bin/python install --no-cache-dir --no-deps --require-hashes -r requirements.lock \
 && python -m pip --python /opt/genie/bin/python install --no-cache-dir --no-deps /wheels/*.whl \
 && python -m pip --python /opt/genie/bin/python check \
 && mkdir /state \
 && find /opt/genie -name '*.so*' -type f -exec strip --strip-unneeded {} +
# Both stages have the same interpreter. One built without optimization could cost more than compiling gains.
RUN ["/opt/genie/bin/python", "-c", "from genie import build; import sys; sys.exit(0 if build.IS_COMPILED and build.is_optimized() else 'The image needs a compiled wheel and an optimized interpreter, not ' + build.description())"]

FROM ${BASE}
COPY --from=build /opt/genie /opt/genie
# The folder of the history: a new volume that is mounted there belongs to the user of the server.
COPY --from=build --chown=10001:10001 --chmod=700 /state /var/lib/genie
# Only a history is written at run time, to GENIE_HISTORY_DIR: the root file system may be read-only.
ENV PATH=/opt/genie/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 GENIE_HOST=0.0.0.0 GENIE_PORT=7077 \
    GENIE_ADMIN_HOST=0.0.0.0 GENIE_ADMIN_PORT=7078
USER 10001:10001
EXPOSE 7077 7078
STOPSIGNAL SIGTERM
# Asks the admin port: healthy as a leader and as a follower, with TLS and with any token file.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["genie", "status", "--local", "--timeout", "3"]
ENTRYPOINT ["genie"]
CMD ["serve"]
