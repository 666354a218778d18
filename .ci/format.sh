#!/usr/bin/env bash
# format.sh [--check] [FILE...]: formats C, C++, CUDA and HIP by .clang-format, or says which files are not so formatted.
# Without files, all that git knows. CLANG_FORMAT names clang-format 19.
set -euo pipefail
cd "$(dirname "$0")/.."
how=(-i)
if [ "${1:-}" = --check ]; then how=(--dry-run -Werror) && shift; fi
files=("$@")
[ $# -gt 0 ] || mapfile -t files < <(git ls-files '*.c' '*.h' '*.hpp' '*.cpp' '*.cu')
program=${CLANG_FORMAT:-$(command -v clang-format-19 || echo clang-format)}
"$program" --version | grep -q 'version 19\.' || { echo "$program is not clang-format 19; pip install 'clang-format==19.*'" >&2; exit 1; }
"$program" "${how[@]}" "${files[@]}"
