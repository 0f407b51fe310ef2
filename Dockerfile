# One image for all services; the command selects the service. Dependencies are installed by hash, the project without an index.
# The digest is of the image index for all platforms (docker-library/repo-info, repos/python/remote, 2026-08-25).
FROM python:3.11.16-slim-trixie@sha256:be1575ed968de893bd54f4c56315ff7c4736ce522c1bca08fd521731aafc0d76 AS build
WORKDIR /build
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN python -m venv /opt/topoalign \
 && /opt/topoalign/bin/pip install --no-cache-dir --require-hashes -r requirements/runtime.txt \
 && python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared
COPY tools tools
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . ./tools \
 && /opt/topoalign/bin/pip install --no-cache-dir --no-deps dist/*.whl

FROM python:3.11.16-slim-trixie@sha256:be1575ed968de893bd54f4c56315ff7c4736ce522c1bca08fd521731aafc0d76
COPY --from=build /opt/topoalign /opt/topoalign
ENV PATH=/opt/topoalign/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 65532 --no-create-home topoalign && install -d -o 65532 -g 65532 -m 0700 /var/lib/topoalign
USER 65532
ENTRYPOINT ["topoalign"]
CMD ["--help"]
