#!/usr/bin/env bash
# Follows "Five changes a new hand makes" of CONTRIBUTING.md: applies each example to a copy of the tree, compares its
# files with the list there, and compiles what it concerns; for the new setting it also runs the tests.
#
#   scripts/recipe.sh [--text] [NAME...]     all of them, or those of docs/recipes/NAME.patch
#
# With --text nothing is compiled.
#
# The copy has a fixed place in the target folder, so that everything in it is built once; it has a target folder of
# its own, because cargo cannot distinguish packages of the same name in two workspaces.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
target=${CARGO_TARGET_DIR:-$root/target}
copy=$target/recipe/tree

copy_tree() {
    rm -rf "$copy"
    mkdir -p "$copy"
    # What git knows of, as it is in the working tree.
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
        if [[ -e $file ]]; then printf '%s\0' "$file"; fi
    done | tar --null --files-from=- --create | tar --extract --directory "$copy"
    # Files have the times of the tree, which are older than what was built here with a patch.
    for patch in docs/recipes/*.patch; do files_of "$patch"; done | while IFS= read -r file; do
        if [[ -e $copy/$file ]]; then touch "$copy/$file"; fi
    done
}

# The files a patch touches, new and deleted ones as well.
files_of() {
    git apply --numstat "$1" | cut -f 3-
}

# The copy is outside of any repository, as far as git knows: there a path is relative to the folder it runs in.
in_copy() {
    GIT_CEILING_DIRECTORIES=$(dirname "$copy") git -C "$copy" apply "$@"
}

# The source files that CONTRIBUTING.md lists for a change, from the link to its patch to the next change.
listed() {
    sed -n "\\|(docs/recipes/$1\\.patch)|,/^\\*\\*\\|^## /s/^- \`\([^\`]*\)\`:.*/\1/p" CONTRIBUTING.md
}

# recipe NAME MOST_FILES COMMAND...: runs the command in the copy with the patch.
recipe() {
    local name=$1 most_files=$2 patch=$root/docs/recipes/$1.patch files
    shift 2
    if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then return; fi
    files=$(files_of "$patch" | sort)
    if (($(wc -l <<<"$files") > most_files)); then
        printf '%s.patch touches more than %s files:\n%s\n' "$name" "$most_files" "$files" >&2
        exit 1
    fi
    if ! diff <(listed "$name" | sort) - <<<"$files" >&2; then
        echo "CONTRIBUTING.md (<) lists other files than $name.patch touches (>)" >&2
        exit 1
    fi
    if ! in_copy -C1 "$patch"; then
        echo "$name.patch no longer applies: follow CONTRIBUTING.md again, and write the difference to docs/recipes" >&2
        exit 1
    fi
    (
        cd "$copy"
        xargs rustfmt --edition "$edition" --check < <(grep '\.rs$' <<<"$files")
        [[ -n $text ]] || "$@"
    )
    in_copy -C1 --reverse "$patch"
    echo "$name: $(wc -l <<<"$files") files of at most $most_files"
}

compile() {
    cargo check --locked --quiet "${@/#/--package=}"
}

# What is generated, so no patch has to hold it: what the setting takes and refuses, and the page.
test_setting() {
    UPDATE_DUMPS=1 run_tests -p redirect-core --lib settings::recorded
    UPDATE_DOCS=1 run_tests -p settings-cli --test it settings_docs::
    setting=$(sed -n 's/^+ *annotations: &\["\(.*\)"\],$/\1/p' "$root/docs/recipes/add-a-setting.patch")
    generated redirect-core/tests/dumps/settings.told "$setting"
    generated docs/reference/settings.md "## \`$setting\`"
    # The table, the reading, the plan; what the generators reach; every property; what was recorded; the JSON and its schema.
    run_tests -p redirect-core --lib
    run_tests -p redirect-core --test it coverage::
    run_tests -p netfilter-state --test it -- properties:: recordings::
    run_tests -p packet-trace --test it json::
}

# A name that no test has selects none, and cargo is content with that.
run_tests() {
    local output
    output=$(cargo test --locked --quiet "$@" 2>&1) || {
        printf '%s\n' "$output" >&2
        return 1
    }
    if ! grep --quiet 'ok\. [1-9]' <<<"$output"; then
        echo "no test ran: cargo test $*" >&2
        return 1
    fi
}

generated() {
    if ! grep --quiet --line-regexp --fixed-strings -- "$2" "$1"; then
        echo "$1 does not have the setting of the recipe" >&2
        exit 1
    fi
}

text=
if [[ ${1:-} = --text ]]; then
    text=yes
    shift
fi
edition=$(sed -n 's/^edition = "\(.*\)"$/\1/p' Cargo.toml)
only=("$@")
for name in "${only[@]}"; do
    if [[ ! -e docs/recipes/$name.patch ]]; then
        echo "docs/recipes/$name.patch does not exist" >&2
        exit 1
    fi
done
copy_tree
export CARGO_TARGET_DIR=$target/recipe/build
# In this order little is compiled twice.
recipe add-a-command 3 compile redirectctl
recipe add-a-metric 2 compile install-cni
recipe add-a-repair-action 4 compile install-cni redirectctl
recipe add-an-expression 4 compile netfilter-state packet-trace
recipe add-a-setting 4 test_setting
