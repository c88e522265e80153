# posttrain in a container. CPU by default; for CUDA:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 -t posttrain .
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /posttrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# torch first, from the index that was chosen; constraints.txt pins the rest.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch \
    && pip install --no-cache-dir -c constraints.txt '.[tasks,sandbox,serve,studio,track,interpret]'
RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["posttrain"]
CMD ["demo"]
