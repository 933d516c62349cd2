# kvroute, for routers and simulated replicas alike: docker build -t kvroute . && docker run kvroute kvroute serve --help
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvroute kvroute
RUN python -m venv /opt/kvroute && /opt/kvroute/bin/pip install --no-cache-dir .

FROM python:3.11-slim
RUN useradd --system --create-home kvroute
COPY --from=build /opt/kvroute /opt/kvroute
ENV PATH=/opt/kvroute/bin:$PATH PYTHONUNBUFFERED=1
USER kvroute
EXPOSE 8000 8001
CMD ["kvroute", "serve", "--help"]
