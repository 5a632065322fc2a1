#!/usr/bin/env perl
# Fails if two types of the shipped code that other modules can name have one name: a reader who searches for it would find two meanings.
# Types that are private to their module, and those of tests and tools, may be called as they like.
use strict;
use warnings;

my %places;
for my $file (split /\n/, `git ls-files '*.rs'`) {
    next if $file =~ m{(^|/)(tests?|benches|fuzz|e2e|examples)/} || $file =~ m{tests?\.rs$};
    next if $file =~ m{^crates/(tools|test-support)/};
    open my $in, '<', $file or die "type-names.pl: $file: $!\n";
    while (<$in>) {
        $places{$1}{$file} = "$file:$." if /^pub(?:\([^)]+\))? (?:struct|enum|trait|union|type) (\w+)/;
    }
}
my @twice = sort grep { keys %{$places{$_}} > 1 } keys %places;
print STDERR "type-names.pl: rename $_ in all but one of: @{[sort values %{$places{$_}}]}\n" for @twice;
exit(@twice ? 1 : 0);
