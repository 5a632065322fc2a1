// promql-names reads expressions of PromQL, one a line, with Prometheus' own parser, and writes for each a line of JSON: the metrics it selects,
// with their matchers, and the labels it groups or matches by, each with the metrics they have to be labels of.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

type matcher struct {
	Label  string `json:"label"`
	Equals bool   `json:"equals"`
	Value  string `json:"value"`
}

type selector struct {
	Metric   string    `json:"metric"`
	Matchers []matcher `json:"matchers"`
}

type grouping struct {
	Labels  []string `json:"labels"`
	Metrics []string `json:"metrics"`
}

type names struct {
	Selectors []selector `json:"selectors"`
	Groupings []grouping `json:"groupings"`
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	output := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		expression, err := parser.ParseExpr(lines.Text())
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", lines.Text(), err)
			os.Exit(1)
		}
		if err := output.Encode(read(expression)); err != nil {
			os.Exit(1)
		}
	}
	if lines.Err() != nil {
		os.Exit(1)
	}
}

func read(expression parser.Expr) names {
	found := names{Selectors: selectors(expression), Groupings: []grouping{}}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		switch node := node.(type) {
		case *parser.AggregateExpr:
			found.Groupings = append(found.Groupings, grouping{node.Grouping, metrics(node.Expr)})
		case *parser.BinaryExpr:
			if node.VectorMatching != nil {
				found.Groupings = append(found.Groupings, grouping{node.VectorMatching.MatchingLabels, metrics(node)})
			}
		}
		return nil
	})
	return found
}

func metrics(expression parser.Expr) []string {
	all := []string{}
	for _, selector := range selectors(expression) {
		all = append(all, selector.Metric)
	}
	return all
}

func selectors(expression parser.Expr) []selector {
	all := []selector{}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		vector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		one := selector{Metric: vector.Name, Matchers: []matcher{}}
		for _, m := range vector.LabelMatchers {
			if m.Name != labels.MetricName {
				equals := m.Type == labels.MatchEqual || m.Type == labels.MatchRegexp
				one.Matchers = append(one.Matchers, matcher{m.Name, equals, m.Value})
			}
		}
		all = append(all, one)
		return nil
	})
	return all
}
