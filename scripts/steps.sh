# Steps of a script, for bash: each has a heading and is timed. Not run by itself.
#
# step NAME COMMAND...   runs the command, and notes the seconds that it took, by the clock and of a processor
# beside COMMAND...      runs the command beside what follows; `together` waits for it, and prints what it printed
# together
# summary NAME           prints the notes, under this name

work=$(mktemp -d)
lane=
trap '[ -z "$lane" ] || kill -- -"$lane" 2>/dev/null || true; rm -rf "$work"' EXIT

step() {
    local name=$1 start=$EPOCHREALTIME
    shift
    printf '\n== %s\n' "$name"
    # In a shell of its own, whose children are this step's alone.
    (
        "$@"
        shell=$BASHPID
        printf '%s\t%s\t%s\n' "$name" "$(((${EPOCHREALTIME/./} - ${start/./}) / 100000))" \
            "$(($(processor_time "$shell") * 10 / $(getconf CLK_TCK)))" >>"$work/took"
    )
}

# Of the processes that a process has waited for, in the kernel's ticks (proc_pid_stat(5): cutime, cstime).
processor_time() {
    local fields
    read -r -a fields < <(sed 's/.*) //' "/proc/$1/stat")
    echo "$((fields[13] + fields[14]))"
}

beside() {
    # A process group of its own, so that all of it ends where another step fails.
    set -m
    ("$@") >"$work/beside" 2>&1 &
    lane=$!
    set +m
}

together() {
    local failed=0
    wait "$lane" || failed=$?
    lane=
    cat "$work/beside"
    return "$failed"
}

summary() {
    printf '\n== %s\n%-44s %9s %17s\n' "$1" "what it took, in seconds" "by clock" "of a processor"
    awk -F '\t' -v clock="$SECONDS" '{ printf "%-44s %9.1f %17.1f\n", $1, $2 / 10, $3 / 10; processor += $3 }
        END { printf "%-44s %9.1f %17.1f\n", "all of it", clock, processor / 10 }' "$work/took"
}
