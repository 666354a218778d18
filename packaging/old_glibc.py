"""old_glibc.py FOLDER COMPILER...: stub libraries, so that what is linked with them runs on an older glibc too.

A linker binds a function to the newest version that glibc has of it. glibc 2.34 moved the threads and the dynamic
loader into libc.so.6 and gave each function of theirs a new version there, with nothing else changed; a library that
was linked after it asks for 2.34, though the functions of 2.2.5 are all that it needs (and they are all still there).
So each stub has the names of those functions, in the newest version that glibc LIMIT had, and the name of the library
that held them then: named before the real libraries, the linker takes the version from there. A stub is never loaded:
at run time it is the system's own library of that name.

The versions are read from this machine's libc.so.6. Whether it worked, auditwheel says by the tag of the wheel.
"""

import pathlib
import re
import subprocess
import sys

LIMIT = (2, 17)
MOVED_BY = (2, 32)  # the first functions moved then, the last in 2.34
# Where a function was before; of those that moved, what is not of the loader or of librt was in libpthread.
LIBRARIES = {
    "libdl.so.2": r"dl\w+",
    "librt.so.1": r"(shm|mq|timer|aio|lio)_\w+",
    "libpthread.so.0": r"(pthread|sem)_\w+",
}


def versions(libc):
    """name: [(version, is default)] of each function."""
    listed = subprocess.run(["readelf", "--dyn-syms", "-W", libc], check=True, capture_output=True, text=True).stdout
    found = {}
    for name, default, version in re.findall(r" (\w+)@(@?)GLIBC_([0-9.]+)$", listed, flags=re.M):
        found.setdefault(name, []).append((tuple(map(int, version.split("."))), bool(default)))
    return found


def stubs(found):
    """library: {version: [names]} to write."""
    result = {library: {} for library in LIBRARIES}
    for name, listed in sorted(found.items()):
        old = [version for version, _ in listed if version <= LIMIT]
        if not old or not any(default and version >= MOVED_BY for version, default in listed):
            continue
        for library, pattern in LIBRARIES.items():
            if re.fullmatch(pattern, name):
                result[library].setdefault(max(old), []).append(name)
                break
    return result


def main(folder, *compiler):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    where = subprocess.run([*compiler, "-print-file-name=libc.so.6"], check=True, capture_output=True, text=True).stdout
    for library, by_version in stubs(versions(where.strip())).items():
        names = [name for listed in by_version.values() for name in listed]
        source, script, stub = (folder / f"{library}{suffix}" for suffix in (".c", ".map", ""))
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names) or "extern int unused;\n")
        groups = (
            f"GLIBC_{'.'.join(map(str, version))} {{ global: {' '.join(f'{name};' for name in listed)} }};\n"
            for version, listed in sorted(by_version.items())
        )
        script.write_text("".join(groups))
        command = [*compiler, "-x", "c", "-fno-builtin", "-shared", "-nostdlib", f"-Wl,-soname,{library}"]
        command += [f"-Wl,--version-script,{script}"] if names else []
        subprocess.run([*command, source, "-o", stub], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
