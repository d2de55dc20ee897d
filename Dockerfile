# A CPU image that runs the quickstart: docker build -t language-games . && docker run -v $PWD/runs:/app/runs language-games
FROM python:3.12-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY envs envs
COPY marl marl
COPY experiments experiments
COPY conf conf
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu . -c constraints.txt
ENTRYPOINT ["python", "-m"]
CMD ["experiments.train", "experiment=among_us_quickstart"]
