"""Writes tests/golden/*.json from the reference: python -m tests.record_golden

Hashes that are already recorded stay: if one would change, or vanish, and PYDET_NUMERICS has not risen since, nothing
is written and the exit status is 1.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))


class Refused(Exception):
    pass


def record(folder, operation, digests, numerics):
    path = folder / f"{operation}.json"
    if path.exists():
        old = json.loads(path.read_text())
        lost = [name for name, value in old["sha256"].items() if digests.get(name) != value]
        if numerics < old["numerics"] or (lost and numerics == old["numerics"]):
            raise Refused(
                f"{operation}: recorded for PYDET_NUMERICS {old['numerics']}, now {numerics}; other bits in "
                f"{len(lost)} of {len(old['sha256'])} cases: {lost[:5]}"
            )
    path.write_text(json.dumps({"numerics": numerics, "sha256": digests}, indent=1) + "\n")


def main():
    import pydet
    from test_golden import DIGESTS, GOLDEN, all_digests, reference_of

    try:
        for operation in DIGESTS:
            record(GOLDEN, operation, all_digests(operation, reference_of(operation)), pydet.NUMERICS)
    except Refused as refusal:
        sys.exit(str(refusal))


if __name__ == "__main__":
    main()
