{{/*
Given names that are not values of this chart. Those that are nearly one, or one at another place, are problems. Values files are shared
with Istio's other charts: names that only those have, and any in "global", pass in silence; all others are noted as ignored, as Istio's
chart would ignore them.
*/}}
{{- define "istio-cni.check" }}
{{- $free := list "resources" "updateStrategy" "env" "affinity" "tolerations" "defaultResources" }}
{{- $others := list "base" "pilot" "istiod" "istiodRemote" "istio_cni" "ztunnel" "gateways" "meshConfig" "proxy" "proxy_init" "sidecarInjectorWebhook" "telemetry" "revisionTags" "defaultRevision" "experimental" "gatewayClasses" "enabled" "defaults" "_internal_defaults_do_not_set" }}
{{- range $name, $value := .given }}
{{- $path := printf "%s%s" $.at $name }}
{{- $reason := get $.ignored.reasons (trimPrefix "cni." $path) }}
{{- if hasKey $.known $name }}
{{- $inner := get $.known $name }}
{{- if and (kindIs "map" $value) (kindIs "map" $inner) $inner (not (has $name $free)) (not (and (eq $name "global") (ne $.at "global."))) }}
{{- $_ := include "istio-cni.check" (dict "given" $value "known" $inner "at" (printf "%s." $path) "root" $.root "problems" $.problems "ignored" $.ignored) }}
{{- end }}
{{- else if $reason }}
{{- $_ := include "istio-cni.ignore" (dict "ignored" $.ignored "path" $path "reason" $reason) }}
{{- else if not (and (has $name $others) (has $.at (list "" "cni."))) }}
{{- $meant := include "istio-cni.meant" (dict "name" $name "known" $.known "at" $.at "root" $.root) }}
{{- if $meant }}
{{- $_ := include "istio-cni.problem" (dict "problems" $.problems "text" (printf "%s is not a value of this chart; did you mean %s?" $path $meant)) }}
{{- else if ne $.at "global." }}
{{- $_ := include "istio-cni.ignore" (dict "ignored" $.ignored "path" $path "reason" "not a value of this chart, nor of Istio's for its plugin") }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The known name that a name is nearly: beside it, or the same one at one other place. */}}
{{- define "istio-cni.meant" }}
{{- $found := list }}
{{- $near := include "istio-cni.shorter" .name | splitList " " }}
{{- range $known := keys .known | sortAlpha }}
{{- range include "istio-cni.shorter" $known | splitList " " }}
{{- if has . $near }}{{ $found = append $found (printf "%s%s" $.at $known) }}{{ end }}
{{- end }}
{{- end }}
{{- if not (or $found (eq .at "global.")) }}
{{- $prefix := ternary "cni." "" (hasPrefix "cni." .at) }}
{{- range $path := include "istio-cni.paths" (dict "tree" .root "at" "") | splitList "\n" }}
{{- if eq ($path | splitList "." | last) $.name }}
{{- $found = append $found (printf "%s%s" (ternary "" $prefix (hasPrefix "global." $path)) $path) }}
{{- end }}
{{- end }}
{{- $found = ternary $found list (eq (len $found) 1) }}
{{- end }}
{{- first $found | default "" }}
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
