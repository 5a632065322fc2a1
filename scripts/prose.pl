#!/usr/bin/env perl
# Checks the words of strings, comments, chart and scripts against the rules of CONTRIBUTING.md ("Plain words"): each expression
# finds what usually breaks one. In Rust it reads strings and comments, elsewhere whole lines. Prints every finding, and fails if any is no exception.
# Without FILE it also counts the words of all documents, and the terms of the glossary.
#
#   prose.pl           the files of @scope
#   prose.pl FILE...   these files
use strict;
use warnings;

# What is checked, as git's pathspecs.
my @scope = ('*/src/*.rs', 'deploy', 'docs/*.md', '*.md', 'scripts', 'Makefile', ':!scripts/prose.pl');

# How many words with a letter or digit the documents may have, and how many terms the glossary.
my ($most_words, $most_terms) = (40_000, 25);

# The rule's name, an expression, and what usually helps.
my @rules = map { my ($name, $expression, $help) = @$_; [$name, qr/$expression/i, $help] } (
    ['negate the verb', '\b(is|are|was|were) no [a-z]+', 'is not a ...'],
    ['negate the verb', '\bis none\b', 'is not a ...'],
    ['name the other party', '\b(no|some|any)body\b', 'program, controller, process, user'],
    ['name the other party', '\bwhoever\b', 'program, controller, process, user'],
    ['name the other party', '\b(of|by|for) others\b', 'of other programs'],
    ['name the other party', 'another writer', 'another program'],
    ['no riddles', '\bwhose it is\b', 'its owner'],
    ['no riddles', 'what .{3,30} left\b', 'write the noun'],
    ['no riddles', '\bone that is not\b', 'write the noun'],
    ['no riddles', '\bwhat is (wanted|missing|there)\b', 'write the noun'],
    ['no riddles', 'where (they|it) stands?\b', 'in place; its position'],
    ['no riddles', 'is \{?[a-z]+\}? meant', 'did you mean ...?'],
    ['use the field\'s word', '\bmend(s|ed|ing)?\b', 'repair'],
    ['use the field\'s word', 'left alone', 'excluded, not captured, unchanged'],
    ['use the field\'s word', 'pass(es)? by the proxy', 'bypass'],
    ['use the field\'s word', 'in the way\b', 'interfere'],
    ['use the field\'s word', 'again and again', 'repeatedly'],
    ['use the field\'s word', '(put|puts) (it )?right\b', 'repair, restore'],
    ['cause, then remedy', 'has to be\b', 'must be, or an imperative'],
    ['no "there is"', '\bthere (is|are|was|were)\b', 'name what exists'],
    ['no "it is ... that"', '\bit is .{1,30} that\b', 'start with the subject'],
    ['software reports', '\b(told|tells?|telling)\b', 'report, receive, distinguish'],
    ['software reports', '\bsays? (so|that|nothing)\b', 'report, mean, set'],
    ['software reports', 'is not reached', 'is unreachable'],
    ['software reports', '\bnot well\b', 'name the state'],
    ['software reports', '\blook(s|ed)? at\b', 'check, read'],
    ['software reports', '\b(hears?|heard|wish(es)?)\b', 'receive, request'],
    ['one fact a sentence', '\b(anew|meanwhile|at present|by now)\b', 'again, concurrently, now'],
);

# What users of the chart set in place of a variable: a message that advises a value names both.
my $charts = join '|', text_of('deploy/charts/istio-cni/files/variables.yaml') =~ /^  ([A-Z_]+): /gm;
my $advice = ['name the chart\'s value', qr/(?<![`\w])(?:$charts)=[a-z0-9-]++(?! \(chart: )/, '(chart: VALUE) behind it'];

# Findings that are right as they are: the file, the words around them, and why.
my @exceptions = (
    [qr{redirect-core/src/pod\.rs$}, 'interceptionMode is NONE', 'the value of an annotation'],
    [qr{redirectctl/src/commands/table\.rs$}, 'redirectctl why nobody-listens', 'a code, which does not change'],
    [qr{docs/}, 'nobody-listens', 'a code, which does not change'],
    [qr{docs/}, 'not-told', 'a code, which does not change'],
    [qr{/recorded\.rs$|scripts/recipe\.sh$}, '.told', 'the names of recorded files'],
);

chomp(my @files = @ARGV ? @ARGV : qx(git ls-files -- @{[map { "'$_'" } @scope]}));
die "prose.pl: no files in scope\n" if !@files;
my ($found, %used) = (0);
for my $path (@files) {
    next if -l $path || !-T $path;
    my $text = text_of($path);
    for ($path =~ /\.rs$/ ? prose_of_rust($text) : numbered(1, $text)) {
        my ($line, $words) = @$_;
        for (@rules, $path =~ /\.rs$/ ? $advice : ()) {
            my ($name, $expression, $help) = @$_;
            next if $words !~ $expression;
            my $match = $&;
            my @excused = grep { $path =~ $exceptions[$_][0] && index($words, $exceptions[$_][1]) >= 0 } 0 .. $#exceptions;
            $used{$_} = 1 for @excused;
            next if @excused;
            $found++;
            print "$path:$line: $name: \"$match\" (better: $help): ", $words =~ s/^\s+//r, "\n";
        }
    }
}
for (grep { !@ARGV && !$used{$_} } 0 .. $#exceptions) {
    print "scripts/prose.pl: exception without a finding: $exceptions[$_][1]\n";
    $found++;
}
for (grep { !@ARGV } ["words in *.md", words(), $most_words], ["terms in docs/README.md", terms(), $most_terms]) {
    my ($what, $count, $most) = @$_;
    next if $count <= $most;
    print "scripts/prose.pl: $count $what, and $most are the limit: shorten what repeats\n";
    $found++;
}
print "$found findings\n" if $found;
exit($found > 0);

sub text_of {
    my ($path) = @_;
    open my $file, '<', $path or die "$path: $!\n";
    return do { local $/; <$file> };
}

# The words of all documents. Those of published crates are mostly programs, which the tests compile, and the changelog grows with each release.
sub words {
    my $count = 0;
    my @documents = grep { $_ eq 'README.md' || !m{(^|/)(README|CHANGELOG)\.md$} || m{^docs/} } split /\n/, qx(git ls-files -- '*.md');
    $count += grep { /[[:alnum:]]/ } split ' ', text_of($_) for @documents;
    return $count;
}

sub terms {
    my ($glossary) = text_of('docs/README.md') =~ /^## Glossary\n(.*)/ms or die "docs/README.md has no glossary\n";
    return scalar(() = $glossary =~ /^- \*\*/mg);
}

# The lines of a text with their numbers.
sub numbered {
    my ($line, $text) = @_;
    return map { [$line++, $_] } split /\n/, $text, -1;
}

# The strings and comments of Rust, by lines. A string without a blank is an identifier or a file; a placeholder is a variable.
sub prose_of_rust {
    my ($text) = @_;
    my ($line, @prose) = (1);
    while ($text =~ m{\G(?:
          (//[^\n]*)
        | (/\*.*?\*/)
        | (b?r(\#*)"(.*?)"\4)
        | (b?"(?:[^"\\]|\\.)*")
        | '(?:[^'\\\n]|\\[^\n]+?)'
        | (\n)
        | \w+
        | .
        )}gsx) {
        my $piece = $1 // $2 // $3 // $6;
        $line++ if defined $7;
        next if !defined $piece;
        my $is_string = !defined $1 && !defined $2;
        if (!$is_string || $piece =~ /\s/) {
            my $words = $is_string ? $piece =~ s/\{(?:told|meant)(?=[:}])/{_/gr : $piece;
            push @prose, numbered($line, $words);
        }
        $line += $piece =~ tr/\n//;
    }
    return @prose;
}
