FROM python:3.13-slim-trixie AS build
# Of pyproject.toml, separated by commas; may be empty.
ARG EXTRAS=metrics
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY flowforge flowforge
COPY sql sql
RUN python -m venv /opt/flowforge \
    && /opt/flowforge/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && /opt/flowforge/bin/pip install --no-cache-dir "$(echo /wheels/flowforge-*.whl)${EXTRAS:+[$EXTRAS]}"

FROM python:3.13-slim-trixie
RUN groupadd --gid 10001 flowforge \
    && useradd --uid 10001 --gid flowforge --no-create-home --home-dir /tmp --shell /usr/sbin/nologin flowforge
COPY --from=build /opt/flowforge /opt/flowforge
ENV PATH=/opt/flowforge/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# Modules with workflows are looked for here, too.
WORKDIR /workflows
USER 10001:10001
ENTRYPOINT ["flowforge"]
