#!/bin/sh
# line.sh LOG WHAT COMMAND...: runs a command of make's and says one line of it. The command and all that it says go to
# LOG, and to the screen too where it fails or complains. V=1 shows every command.
log=$1 what=$2
shift 2
[ "$V" = 1 ] && echo "$*" || echo "$what"
if said=$("$@" 2>&1); then status=0; else status=$?; fi
printf '%s\n' "$*${said:+
$said}" >>"$log"
[ "$status" = 0 ] || echo "$*" >&2
[ -z "$said" ] || printf '%s\n' "$said" >&2
[ "$status" = 0 ] || echo "make: this failed with status $status; $log has all commands" >&2
exit "$status"
