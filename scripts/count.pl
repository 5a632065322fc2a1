#!/usr/bin/perl
# Lines of shipped Rust by crate, largest first: without blanks, comments, tests, harness and tools. With a folder, also its files. Then those of the
# harness, counted alike: what tests share.
#
#   count.pl [FOLDER]
use strict;
use warnings;

my ($folder) = @ARGV;
my (%of_file, %of_crate, %lines_of, %is_test);
my ($all, $harness) = (0, 0);
my $is_harness = qr{^(e2e/src/(?!bin/)|crates/test-support/src/|crates/tools/src/suite/)|/tests/.*/(\w+_support|common|model)/};
for my $file (split /\n/, `git ls-files '*.rs'`) {
    if ($file !~ $is_harness) {
        next if $file =~ m{(^|/)(tests?|benches|fuzz|e2e|examples)/} || $file =~ m{tests?\.rs$};
        next if $file =~ m{^crates/(tools|test-support)/};
    }
    open my $in, '<', $file or die "count.pl: $file: $!\n";
    my @lines = <$in>;
    $lines_of{$file} = \@lines;
    # A module in a file of its own that tests alone are compiled with.
    my $folder = $file =~ s{(/mod|/lib|/main)?\.rs$}{}r;
    my $text = join '', @lines;
    $is_test{"$folder/$1"} = 1 while $text =~ /^#\[cfg\(test\)\]\n(?:pub(?:\(\w+\))? )?mod (\w+);/mg;
}
for my $file (sort keys %lines_of) {
    my @folders = split m{/}, $file =~ s/\.rs$//r;
    next if grep { $is_test{join '/', @folders[0 .. $_]} } 0 .. $#folders;
    my @lines = @{$lines_of{$file}};
    my ($count, $is_of_test, $in_tests) = (0, 0, 0);
    for my $line (@lines) {
        # rustfmt ends a module of tests with the first brace at the margin.
        if ($in_tests) { $in_tests = 0 if $line =~ /^\}/; next }
        if ($is_of_test) { ($is_of_test, $in_tests) = (0, $line =~ /\{\s*$/); next }
        if ($line =~ /^#\[cfg\(test\)\]/) { $is_of_test = 1; next }
        $count++ unless $line =~ m{^\s*$} || $line =~ m{^\s*//};
    }
    $of_file{$file} = $count;
    if ($file =~ $is_harness) {
        $harness += $count;
        next;
    }
    my ($crate) = $file =~ m{^((?:crates/)?[^/]+)};
    $of_crate{$crate} += $count;
    $all += $count;
}
sub listed {
    my ($counts, @names) = @_;
    printf "%6d %s\n", $counts->{$_}, $_ for sort { $counts->{$b} <=> $counts->{$a} } @names;
}
listed(\%of_crate, keys %of_crate);
printf "%6d in all\n%6d of the harness\n", $all, $harness;
listed(\%of_file, grep { index($_, $folder) == 0 } keys %of_file) if defined $folder;
