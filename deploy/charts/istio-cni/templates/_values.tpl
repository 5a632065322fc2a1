{{/*
The values in force, as YAML: defaults, then the platform's, then what was given, at the top level and, above that, under "cni". Fails with
everything that is wrong with what was given.
*/}}
{{- define "istio-cni.values" -}}
{{- $values := .Files.Get "files/defaults.yaml" | fromYaml }}
{{- $known := deepCopy $values }}
{{- $problems := dict "list" list }}
{{- $ignored := dict "list" list "reasons" (.Files.Get "files/ignored.yaml" | fromYaml) }}
{{- $global := deepCopy (.Values.global | default dict) }}
{{- $given := omit (deepCopy .Values) "global" "cni" "_internal_defaults_do_not_set" }}
{{- $_ := include "istio-cni.check" (dict "given" $given "known" $known "at" "" "root" $known "problems" $problems "ignored" $ignored) }}
{{- with .Values._internal_defaults_do_not_set }}
{{- $_ := include "istio-cni.ignore" (dict "ignored" $ignored "path" "_internal_defaults_do_not_set" "reason" "these are the defaults of Istio's chart; set values without that prefix") }}
{{- end }}
{{- with .Values.cni }}
{{- $_ := include "istio-cni.check" (dict "given" . "known" $known "at" "cni." "root" $known "problems" $problems "ignored" $ignored) }}
{{- $_ := include "istio-cni.merge" (dict "into" $given "from" (omit (deepCopy .) "global")) }}
{{- $_ := include "istio-cni.merge" (dict "into" $global "from" (deepCopy (.global | default dict))) }}
{{- end }}
{{- $_ := include "istio-cni.check" (dict "given" $global "known" $known.global "at" "global." "root" $known "problems" $problems "ignored" $ignored) }}

{{- $platforms := .Files.Get "files/platforms.yaml" | fromYaml }}
{{- $profile := $given.profile | default $global.profile | default "" }}
{{- $platform := $given.platform | default $global.platform | default (ternary (trimPrefix "platform-" $profile) "" (hasPrefix "platform-" $profile)) }}
{{- if and (not $platform) (contains "-gke" .Capabilities.KubeVersion.Version) }}
{{- $platform = "gke" }}
{{- end }}
{{- if hasKey $platforms $platform }}
{{- $_ := include "istio-cni.merge" (dict "into" $values "from" (get $platforms $platform)) }}
{{- else if $platform }}
{{- $_ := include "istio-cni.problem" (dict "problems" $problems "text" (printf "platform: %q is not one of %s" $platform (keys $platforms | sortAlpha | join ", "))) }}
{{- end }}
{{- if eq $profile "ambient" }}
{{- $_ := set $values.ambient "enabled" true }}
{{- end }}
{{- $_ := include "istio-cni.merge" (dict "into" $values "from" $given) }}
{{- $_ := include "istio-cni.merge" (dict "into" $values.global "from" $global) }}
{{- $_ := set $values "platform" $platform }}
{{- $_ := include "istio-cni.environment" (dict "root" . "values" $values "problems" $problems "ignored" $ignored) }}
{{- $_ := set $values "_ignored" $ignored.list }}
{{- $isStated := or (eq $profile "ambient") (kindIs "bool" (get (get $given "ambient" | default dict) "enabled")) (hasKey (get $given "env" | default dict) "AMBIENT_ENABLED") }}
{{- $_ := include "istio-cni.refuse" (dict "values" $values "root" . "problems" $problems "isStated" $isStated) }}
{{- with $problems.list }}
{{- fail (printf "\n\nThe values cannot be used:\n- %s\n" (join "\n- " .)) }}
{{- end }}
{{- toYaml $values }}
{{- end }}

{{/* Lays one map over another: maps are merged, everything else is replaced. null is an empty list in the place of a list, and nothing said
     in any other. */}}
{{- define "istio-cni.merge" }}
{{- range $key, $value := .from }}
{{- $old := get $.into $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $old) }}
{{- $_ := include "istio-cni.merge" (dict "into" $old "from" $value) }}
{{- else if and (kindIs "invalid" $value) (kindIs "slice" $old) }}
{{- $_ := set $.into $key list }}
{{- else if not (and (kindIs "invalid" $value) (hasKey $.into $key)) }}
{{- $_ := set $.into $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of env that stand for a value set it, so that the rights, mounts and ports of that value come with them. Leaves out those
     that are empty, which Istio's agent counts as unset, and those that the chart sets. */}}
{{- define "istio-cni.environment" }}
{{- $values := .values }}
{{- $variables := .root.Files.Get "files/variables.yaml" | fromYaml }}
{{- $env := dict }}
{{- range $name, $given := $values.env }}
{{- $text := ternary "" (toString $given) (kindIs "invalid" $given) }}
{{- $path := get $variables.values $name }}
{{- if has $name $variables.chart }}
{{- $_ := include "istio-cni.ignore" (dict "ignored" $.ignored "path" (printf "env.%s" $name) "reason" "the chart sets this") }}
{{- else if and $path $text }}
{{- $into := ternary (get $values ($path | splitList "." | first)) $values (contains "." $path) }}
{{- $key := $path | splitList "." | last }}
{{- $kind := ternary (get $into $key | kindOf) "number" (has (get $into $key | kindOf) (list "bool" "string")) }}
{{- if regexMatch (get (dict "bool" "^(1|t|T|true|TRUE|True|0|f|F|false|FALSE|False)$" "number" "^[0-9]{1,5}$" "string" "") $kind) $text }}
{{- $_ := set $into $key (get (dict "bool" (has $text (list "1" "t" "T" "true" "TRUE" "True")) "number" (int $text) "string" $text) $kind) }}
{{- else }}
{{- $_ := include "istio-cni.problem" (dict "problems" $.problems "text" (printf "env.%s: %q is not a value for %s" $name $text $path)) }}
{{- end }}
{{- else if not $path }}
{{- $_ := set $env $name $text }}
{{- if not (has $name (concat $variables.others $variables.refused)) }}
{{- $_ := include "istio-cni.ignore" (dict "ignored" $.ignored "path" (printf "env.%s" $name) "reason" "not a setting of this agent") }}
{{- end }}
{{- end }}
{{- end }}
{{- $_ := set $values "env" $env }}
{{- end }}

{{/* Notes that something given has no effect. */}}
{{- define "istio-cni.ignore" }}
{{- $_ := set .ignored "list" (append .ignored.list (printf "%s: %s" .path .reason)) }}
{{- end }}

{{- define "istio-cni.problem" }}
{{- $_ := set .problems "list" (append .problems.list .text) }}
{{- end }}

{{/* What cannot be, whatever the names. */}}
{{- define "istio-cni.refuse" }}
{{- $values := .values }}
{{- $problems := .problems }}
{{- $refuse := list }}
{{- $profile := $values.profile | default $values.global.profile | default "default" }}
{{- $compatibility := $values.compatibilityVersion | default "1.30" | toString }}
{{- if not (regexMatch "^(ambient|default|demo|preview|remote|stable|platform-.*|compatibility-version-.*)$" $profile) }}
{{- $refuse = append $refuse (printf "profile: %q is not one of ambient, default, demo, preview, remote, stable" $profile) }}
{{- end }}
{{- if not (regexMatch "^1\\.(2[4-9]|[3-9][0-9])$" $compatibility) }}
{{- $refuse = append $refuse (printf "compatibilityVersion: %q is not a minor version of Istio from 1.24 on" $compatibility) }}
{{- end }}
{{- range $name := list "ownNodePolicy" "proxyUserPolicy" }}
{{- if and (get $values $name).enabled (not (semverCompare ">=1.30.0-0" $.root.Capabilities.KubeVersion.Version)) }}
{{- $refuse = append $refuse (printf "%s.enabled: needs Kubernetes 1.30 or newer; this is %s" $name $.root.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- with .root.Values.defaults }}
{{- $refuse = append $refuse "defaults: Istio's chart refuses this too; set the values without that prefix" }}
{{- end }}
{{- if not $values.ambient.enabled }}
{{- $leaves := "but ambient.enabled is false: pods of the ambient mesh would lose their traffic. Set ambient.enabled=true; or take its pods out of ambient mode first (docs/tasks/ambient.md)" }}
{{- /* Only Istio's agent has this version there. Our own may be switched off. */}}
{{- $config := lookup "v1" "ConfigMap" .root.Release.Namespace "istio-cni-config" }}
{{- if and (eq (dig "data" "AMBIENT_ENABLED" "false" $config) "true") (dig "data" "CURRENT_AGENT_VERSION" "" $config) }}
{{- $refuse = append $refuse (printf "ambient is on in this cluster (ConfigMap istio-cni-config of namespace %s has AMBIENT_ENABLED=true), %s" .root.Release.Namespace $leaves) }}
{{- end }}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items }}
{{- if or (eq .metadata.name "ztunnel") (has "ztunnel" (list (dig "app" "" .spec.template.metadata.labels) (dig "app.kubernetes.io/name" "" .spec.template.metadata.labels))) }}
{{- $refuse = append $refuse (printf "ambient is on in this cluster (DaemonSet %s in namespace %s), %s, and ztunnel" .metadata.name .metadata.namespace $leaves) }}
{{- end }}
{{- end }}
{{- /* helm template, and with it Argo CD, sees no cluster, where this is always there. */}}
{{- if not (or .isStated (lookup "v1" "Service" "default" "kubernetes")) }}
{{- $refuse = append $refuse "ambient.enabled: say what it is. Helm sees no cluster here, so it cannot know whether pods are in ambient mode, which would lose their traffic without it; set ambient.enabled=false if none is, or true" }}
{{- end }}
{{- end }}
{{- if hasKey ($values.podLabels | default dict) "k8s-app" }}
{{- $refuse = append $refuse "podLabels: k8s-app is what the DaemonSet selects its pods by" }}
{{- end }}
{{- if hasKey $values.env "PLUGIN_SERVICE_ACCOUNT" }}
{{- $refuse = append $refuse "env.PLUGIN_SERVICE_ACCOUNT: set pluginToken.enabled, because the chart brings the account" }}
{{- end }}
{{- $controller := $values.taintController }}
{{- range $name := list "healthPort" "monitoringPort" }}
{{- if and $controller.enabled $values.hostNetwork (has (int (get $controller $name)) (list (int $values.healthPort) (int $values.monitoringPort))) (gt (int (get $controller $name)) 0) }}
{{- $refuse = append $refuse (printf "taintController.%s: the agents have port %d of every node" $name (int (get $controller $name))) }}
{{- end }}
{{- end }}
{{- if ne $values.global.resourceScope "cluster" }}
{{- with (include "istio-cni.image-choice" (dict "root" .root "values" $values) | fromYaml).problem }}
{{- $refuse = append $refuse . }}
{{- end }}
{{- end }}
{{- range $refuse }}
{{- $_ := include "istio-cni.problem" (dict "problems" $problems "text" .) }}
{{- end }}
{{- end }}
