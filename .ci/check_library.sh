#!/usr/bin/env bash
# check_library.sh LIBRARY [OBJECTS]: what the built library shows to the linker is only what it promises.
# - it exports pydet_* and nothing else, and every function that pydet.h, entry/python.h and entry/xla_ffi.h declare;
# - it needs only libc, libm, libstdc++, libgcc_s, libpthread and the loader (of CUDA and HIP, what their builds name);
# - of libstdc++ it needs no symbol that a wheel for manylinux_2_17 may not (glibc's are mended by packaging/old_glibc.py);
# - it is hardened: addresses bound at the start and then read-only, no executable stack, guards of stacks, checked copies,
#   and on x86-64 marks where an indirect call may land;
# - OBJECTS (the build folder): code for a wider instruction set defines no weak symbol, which the linker could pick
#   for an older CPU (DW.ref.*, the compiler's pointers to its exception routine, are data), and no other code uses its
#   registers.
set -euo pipefail
library=$1 objects=${2:-}
native=$(dirname "$0")/../native
failed=0
complain() { echo "$library: $*" >&2; failed=1; }

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sort)
declared=$(sed 's,/[*].*[*]/,,' "$native/include/pydet.h" "$native/entry/python.h" "$native/entry/xla_ffi.h" | grep -o '^PYDET_API [^(]*(' |
  sed 's/.*[ *]\(pydet_[a-z0-9_]*\)($/\1/' | sort)
[ "$(wc -w <<<"$declared")" -ge 20 ] || complain "found only these declarations: $declared"
foreign=$(grep -v '^pydet_' <<<"$exported" || true)
[ -z "$foreign" ] || complain "exports" $foreign
[ "$exported" = "$declared" ] ||
  complain "exported and declared differ:" $(comm -3 <(echo "$exported") <(echo "$declared"))

allowed='^(libc|libm|libstdc\+\+|libgcc_s|libpthread|ld-linux-[a-z0-9-]+)\.so\.[0-9]+$'
case $library in
  *libpydet_cuda.so) allowed="$allowed|^(libdl|librt)\.so\.[0-9]+$" ;;
  *libpydet_hip.so) allowed="$allowed|^libamdhip64\.so" ;;
esac
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p')
other=$(grep -Ev "$allowed" <<<"$needed" || true)
[ -z "$other" ] || complain "needs" $other
[ -z "$(readelf -d "$library" | grep -E 'R(UN)?PATH|TEXTREL' || true)" ] ||
  complain "has a run path or text relocations"
readelf -lW "$library" | grep -q 'GNU_STACK.* RW ' || complain "asks for an executable stack"
readelf -lW "$library" | grep -q GNU_RELRO || complain "leaves its relocated addresses writable"
readelf -dW "$library" | grep -q 'FLAGS.*NOW' || complain "binds functions late"
newer=$(nm -D --undefined-only --with-symbol-versions "$library" |
  grep -E '@(GLIBCXX_3\.4\.[2-9][0-9]|CXXABI_1\.3\.([89]|[1-9][0-9]))$' || true)
[ -z "$newer" ] || complain "needs a newer libstdc++ than a wheel for manylinux_2_17 may:" $newer
imported=$(nm -D --undefined-only "$library" | sed 's/.* //; s/@.*//')
grep -qx __stack_chk_fail <<<"$imported" || complain "has no guards of stacks (-fstack-protector-strong)"
grep -qE '^__[a-z]+_chk$' <<<"$imported" || complain "has no checked copies (_FORTIFY_SOURCE)"
if [ "$(uname -m)" = x86_64 ]; then
  unmarked=$(objdump -d --no-show-raw-insn "$library" |
    awk '/^[0-9a-f]+ <pydet_[a-z0-9_]+>:$/ { name = $2; getline; if (!/endbr64/) print name }')
  [ -z "$unmarked" ] || complain "no endbr64 (-fcf-protection) in" $unmarked
fi

count() { grep -c "$@" || true; }
if [ -n "$objects" ]; then
  wide=0 narrow=0
  for object in $(find "$objects" -name '*.o' \( -path "$objects/entry/*" -o -path "$objects/ops/*" -o -not -path "$objects/*/*/*" \)); do
    case $object in
      *.avx2.o | *.avx512.o)
        wide=$((wide + 1))
        weak=$(nm "$object" | awk 'NF == 3 && $2 ~ /^[WVuwv]$/ && $3 !~ /^DW[.]ref[.]/ { print $3 }')
        [ -z "$weak" ] || complain "$object defines weak symbols:" $weak
        case $object in *.avx2.o)
          zmm=$(objdump -d --no-show-raw-insn "$object" | count '%zmm')
          [ "$zmm" = 0 ] || complain "$object: $zmm instructions use zmm registers" ;;
        esac ;;
      *)
        narrow=$((narrow + 1))
        ymm=$(objdump -d --no-show-raw-insn "$object" | count -E '%[yz]mm')
        [ "$ymm" = 0 ] || complain "$object: $ymm instructions use ymm or zmm registers" ;;
    esac
  done
  [ "$narrow" -ge 3 ] || complain "found only $narrow baseline objects under $objects"
  [ "$(uname -m)" != x86_64 ] || [ "$wide" -ge 2 ] || complain "found only $wide avx objects under $objects"
fi
[ "$failed" = 0 ] && echo "$library: exports $(wc -l <<<"$exported") symbols, all declared; needs" $needed
exit "$failed"
