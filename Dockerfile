# longce with CUDA, for machines with NVIDIA's container toolkit:
#
#   docker build -t longce .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" -v "$HOME/.cache:/root/.cache" longce score report.txt --model M --evaluator E
#
# The image has a compiler, which `compile: true` needs. PyPI's torch brings its own CUDA libraries; the driver is the host's.
FROM python:3.12

WORKDIR /opt/longce
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[all,gguf,quantize,ray]"

# Results are written to the working directory. Configs such as configs/base.yaml are found in the package.
WORKDIR /work
ENTRYPOINT ["longce"]
CMD ["--help"]
