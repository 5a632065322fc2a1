{{/*
The values in force, as YAML: defaults, then the platform's, then what was given, at the top level and, above that, under "cni". Fails with
everything that is wrong with what was given.
*/}}
{{- define "istio-cni.values" -}}
{{- $values := .Files.Get "files/defaults.yaml" | fromYaml }}
{{- $known := deepCopy $values }}
{{- $problems := dict "list" list }}
{{- $global := deepCopy (.Values.global | default dict) }}
{{- $given := omit (deepCopy .Values) "global" "cni" "_internal_defaults_do_not_set" }}
{{- $_ := include "istio-cni.check" (dict "given" $given "known" $known "at" "" "root" $known "problems" $problems) }}
{{- with .Values.cni }}
{{- $_ := include "istio-cni.check" (dict "given" . "known" $known "at" "cni." "root" $known "problems" $problems) }}
{{- $_ := include "istio-cni.merge" (dict "into" $given "from" (deepCopy .)) }}
{{- end }}
{{- $_ := include "istio-cni.check" (dict "given" $global "known" $known.global "at" "global." "root" $known "problems" $problems) }}

{{- $platforms := .Files.Get "files/platforms.yaml" | fromYaml }}
{{- $platform := $given.platform | default $global.platform | default "" }}
{{- if and (not $platform) (contains "-gke" .Capabilities.KubeVersion.Version) }}
{{- $platform = "gke" }}
{{- end }}
{{- if hasKey $platforms $platform }}
{{- $_ := include "istio-cni.merge" (dict "into" $values "from" (get $platforms $platform)) }}
{{- else if $platform }}
{{- $_ := include "istio-cni.problem" (dict "problems" $problems "text" (printf "platform: %q is not one of %s" $platform (keys $platforms | sortAlpha | join ", "))) }}
{{- end }}
{{- $_ := include "istio-cni.merge" (dict "into" $values "from" $given) }}
{{- $_ := include "istio-cni.merge" (dict "into" $values.global "from" $global) }}
{{- $_ := set $values "platform" $platform }}
{{- $_ := include "istio-cni.refuse" (dict "values" $values "root" . "problems" $problems) }}
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

{{- define "istio-cni.problem" }}
{{- $_ := set .problems "list" (append .problems.list .text) }}
{{- end }}

{{/* What cannot be, whatever the names. */}}
{{- define "istio-cni.refuse" }}
{{- $values := .values }}
{{- $problems := .problems }}
{{- $refuse := list }}
{{- $profile := $values.profile | default $values.global.profile | default "default" }}
{{- $compatibility := $values.compatibilityVersion | default $values.global.compatibilityVersion | default "1.29" | toString }}
{{- $profiles := list "default" "demo" "preview" "remote" "stable" }}
{{- if or (eq $profile "ambient") $values.ambient.enabled }}
{{- $refuse = append $refuse "ambient: this agent has no ambient mode, and pods of the ambient mesh would lose their traffic; keep Istio's own chart for this cluster, or set ambient.enabled=false and another profile" }}
{{- else if not (has $profile $profiles) }}
{{- $refuse = append $refuse (printf "profile: %q is not one of %s" $profile (join ", " $profiles)) }}
{{- end }}
{{- if not (has $compatibility (list "1.27" "1.28" "1.29")) }}
{{- $refuse = append $refuse (printf "compatibilityVersion: %q is not one of 1.27, 1.28, 1.29" $compatibility) }}
{{- end }}
{{- $config := lookup "v1" "ConfigMap" .root.Release.Namespace "istio-cni-config" }}
{{- if eq (dig "data" "AMBIENT_ENABLED" "false" $config) "true" }}
{{- $refuse = append $refuse (printf "ambient is on in this cluster (ConfigMap istio-cni-config of namespace %s has AMBIENT_ENABLED=true), and this agent has no ambient mode: pods of the ambient mesh would lose their traffic" .root.Release.Namespace) }}
{{- end }}
{{- if lookup "apps/v1" "DaemonSet" .root.Release.Namespace "ztunnel" }}
{{- $refuse = append $refuse (printf "ambient is on in this cluster (DaemonSet ztunnel in namespace %s), and this agent has no ambient mode: pods of the ambient mesh would lose their traffic" .root.Release.Namespace) }}
{{- end }}
{{- if hasKey ($values.podLabels | default dict) "k8s-app" }}
{{- $refuse = append $refuse "podLabels: k8s-app is what the DaemonSet selects its pods by" }}
{{- end }}
{{- $switches := dict "DRIFT_WATCH_INTERVAL" "driftWatch.interval" "DRIFT_HEAL" "driftWatch.heal" "NODE_TAINT" "nodeTaint.enabled" "NODE_CONDITION" "nodeCondition.enabled" "REPAIR_ENABLED" "repair.enabled" "REPAIR_REPAIR_PODS" "repair.repairPods" "REPAIR_DELETE_PODS" "repair.deletePods" "REPAIR_LABEL_PODS" "repair.labelPods" "PLUGIN_SERVICE_ACCOUNT" "pluginToken.enabled" "LANDLOCK" "landlock" "HEALTH_PORT" "healthPort" "MONITORING_PORT" "monitoringPort" }}
{{- range $name, $_ := $values.env }}
{{- with get $switches $name }}
{{- $refuse = append $refuse (printf "env.%s: set %s, which sees to what goes with it as well" $name .) }}
{{- end }}
{{- if has $name (list "NODE_NAME" "POD_NAME" "POD_NAMESPACE" "POD_IP" "HOST_IP" "HEALTH_ADDRESS" "SETTINGS_DIR") }}
{{- $refuse = append $refuse (printf "env.%s: the chart sets this" $name) }}
{{- end }}
{{- end }}
{{- $controller := $values.taintController }}
{{- range $name := list "healthPort" "monitoringPort" }}
{{- if and $controller.enabled $values.hostNetwork (has (int (get $controller $name)) (list (int $values.healthPort) (int $values.monitoringPort))) (gt (int (get $controller $name)) 0) }}
{{- $refuse = append $refuse (printf "taintController.%s: the agents have port %d of every node" $name (int (get $controller $name))) }}
{{- end }}
{{- end }}
{{- range $refuse }}
{{- $_ := include "istio-cni.problem" (dict "problems" $problems "text" .) }}
{{- end }}
{{- end }}
