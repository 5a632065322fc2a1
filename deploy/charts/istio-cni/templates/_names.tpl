{{/*
Given names that are not values of this chart, each with the one probably intended. Values files are shared with Istio's other
charts: their names are let pass at the top level (and where `helm upgrade --reuse-values` has put the defaults of Istio's chart), and any name in "global" that is not nearly one of ours.
*/}}
{{- define "istio-cni.check" }}
{{- $free := list "resources" "updateStrategy" "env" "affinity" "tolerations" "defaultResources" }}
{{- $others := list "base" "pilot" "istiod" "istiodRemote" "istio_cni" "ztunnel" "gateways" "meshConfig" "proxy" "proxy_init" "sidecarInjectorWebhook" "telemetry" "revisionTags" "defaultRevision" "experimental" "gatewayClasses" "enabled" "_internal_defaults_do_not_set" }}
{{- range $name, $value := .given }}
{{- $path := printf "%s%s" $.at $name }}
{{- if hasKey $.known $name }}
{{- $inner := get $.known $name }}
{{- if and (kindIs "map" $value) (kindIs "map" $inner) }}
{{- if and $inner (not (has $name $free)) }}
{{- $_ := include "istio-cni.check" (dict "given" $value "known" $inner "at" (printf "%s." $path) "root" $.root "problems" $.problems) }}
{{- end }}
{{- end }}
{{- else if not (and (has $name $others) (has $.at (list "" "cni."))) }}
{{- $meant := include "istio-cni.meant" (dict "name" $name "known" $.known "at" $.at "root" $.root) }}
{{- if $meant }}
{{- $_ := include "istio-cni.problem" (dict "problems" $.problems "text" (printf "%s is not a value of this chart; did you mean %s?" $path $meant)) }}
{{- else if ne $.at "global." }}
{{- $_ := include "istio-cni.problem" (dict "problems" $.problems "text" (printf "%s is not a value of this chart" $path)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The known name that a name is nearly: beside it, or the same one at another place. */}}
{{- define "istio-cni.meant" }}
{{- $found := "" }}
{{- $near := include "istio-cni.shorter" .name | splitList " " }}
{{- range $known := keys .known | sortAlpha }}
{{- if not $found }}
{{- range include "istio-cni.shorter" $known | splitList " " }}
{{- if has . $near }}{{ $found = printf "%s%s" $.at $known }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (or $found (eq .at "global.")) }}
{{- $prefix := ternary "cni." "" (hasPrefix "cni." .at) }}
{{- range $path := include "istio-cni.paths" (dict "tree" .root "at" "") | splitList "\n" }}
{{- if and (not $found) (eq ($path | splitList "." | last) $.name) }}
{{- $found = printf "%s%s" (ternary "" $prefix (hasPrefix "global." $path)) $path }}
{{- end }}
{{- end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* A name without regard to case and separators, and all that is left of it when one letter is taken out: two names that share one are
     one slip apart. Short names only as they are. */}}
{{- define "istio-cni.shorter" }}
{{- $name := . | lower | replace "_" "" | replace "-" "" }}
{{- $name }}
{{- if ge (len $name) 4 }}
{{- range $at := until (len $name) }} {{ substr 0 $at $name }}{{ substr (int (add1 $at)) (len $name) $name }}{{ end }}
{{- end }}
{{- end }}

{{/* Every value's path, a line each. */}}
{{- define "istio-cni.paths" }}
{{- range $name, $value := .tree }}
{{- printf "%s%s\n" $.at $name }}
{{- if kindIs "map" $value }}{{ include "istio-cni.paths" (dict "tree" $value "at" (printf "%s%s." $.at $name)) }}{{ end }}
{{- end }}
{{- end }}
