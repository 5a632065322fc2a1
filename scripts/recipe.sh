#!/usr/bin/env bash
# Follows "A new annotation" of CONTRIBUTING.md: applies its example to a copy of the tree and runs the tests that
# a new setting concerns. The copy has a fixed place in the target folder, so that everything in it is built once; it has a
# target folder of its own, because cargo cannot distinguish packages of the same name in two workspaces.
set -euo pipefail
cd "$(dirname "$0")/.."

patch=docs/recipes/add-a-setting.patch
most_files=4
target=${CARGO_TARGET_DIR:-$PWD/target}
copy=$target/recipe/tree

files=$(grep -c '^+++ ' "$patch")
if ((files > most_files)); then
    echo "$patch touches $files files; a setting should need $most_files at most" >&2
    exit 1
fi

rm -rf "$copy"
mkdir -p "$copy"
# What git knows of, as it is in the working tree.
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [[ -e $file ]]; then printf '%s\0' "$file"; fi
done | tar --null --files-from=- --create | tar --extract --directory "$copy"

# Outside of any repository, as far as git knows: there a path is relative to the folder it runs in.
if ! GIT_CEILING_DIRECTORIES=$(dirname "$copy") git -C "$copy" apply -C1 "$PWD/$patch"; then
    echo "$patch no longer applies: follow the recipe in CONTRIBUTING.md again, and write the difference there" >&2
    exit 1
fi

cd "$copy"
export CARGO_TARGET_DIR=$target/recipe/build
cargo fmt --check --package redirect-core
# What is generated, so no patch has to hold it: what the setting takes and refuses, and the page.
UPDATE_DUMPS=1 cargo test --locked --quiet -p redirect-core --lib settings::recorded
UPDATE_DOCS=1 cargo test --locked --quiet -p settings-cli --test reference
setting=$(sed -n 's/^+ *annotations: &\["\(.*\)"\],$/\1/p' "$OLDPWD/$patch")
generated() {
    if ! grep --quiet --line-regexp --fixed-strings -- "$2" "$1"; then
        echo "$1 does not have the setting of the recipe" >&2
        exit 1
    fi
}
generated redirect-core/tests/dumps/settings.told "$setting"
generated docs/reference/settings.md "## \`$setting\`"
# The table, the reading, the plan; what the generators reach; every property; what was recorded; the JSON and its schema.
cargo test --locked --quiet -p redirect-core --lib --test coverage
cargo test --locked --quiet -p netfilter-state --test properties --test recordings
cargo test --locked --quiet -p packet-trace --test json
