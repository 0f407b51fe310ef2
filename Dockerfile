# One image for all services; the command says which. Dependencies are installed by hash, the project without its index.
FROM python:3.11-slim AS build
WORKDIR /build
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN python -m venv /opt/topoalign \
 && /opt/topoalign/bin/pip install --no-cache-dir --require-hashes -r requirements/runtime.txt \
 && python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
 && /opt/topoalign/bin/pip install --no-cache-dir --no-deps dist/*.whl

FROM python:3.11-slim
COPY --from=build /opt/topoalign /opt/topoalign
ENV PATH=/opt/topoalign/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 65532 --no-create-home topoalign && install -d -o 65532 -g 65532 -m 0700 /var/lib/topoalign
USER 65532
ENTRYPOINT ["topoalign"]
CMD ["--help"]
