#!/bin/sh
# line.sh LOG WHAT COMMAND...: runs a command of make's and says one line of it. The command and all that it says go to
# LOG, and to the screen too where it fails or complains. V=1 shows every command. PYDET_ACCOUNT names a file that gets
# what each command took, as seconds of processor time.
log=$1 what=$2
shift 2
[ "$V" = 1 ] && echo "$*" || echo "$what"
if said=$("$@" 2>&1); then status=0; else status=$?; fi
printf '%s\n' "$*${said:+
$said}" >>"$log"
if [ -n "$PYDET_ACCOUNT" ]; then
  times >"$PYDET_ACCOUNT.$$" # a pipe would give it a shell of its own, which has no children
  sed -n '2s/[ms]/ /gp' "$PYDET_ACCOUNT.$$" |
    awk -v what="$what" '{ printf "%.2f\t%s\n", 60 * ($1 + $3) + $2 + $4, what }' >>"$PYDET_ACCOUNT"
  rm -f "$PYDET_ACCOUNT.$$"
fi
[ "$status" = 0 ] || echo "$*" >&2
[ -z "$said" ] || printf '%s\n' "$said" >&2
[ "$status" = 0 ] || echo "make: this failed with status $status; $log has all commands" >&2
exit "$status"
