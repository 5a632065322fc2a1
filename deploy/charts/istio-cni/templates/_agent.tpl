{{/* What the values switch on, as YAML: what is done with broken pods, whether the agent enters pods and reads
     what their processes are, and what it may do. */}}
{{- define "istio-cni.powers" -}}
{{- $repair := "" }}
{{- if .repair.enabled }}
{{- $repair = ternary "label" $repair .repair.labelPods }}
{{- $repair = ternary "delete" $repair .repair.deletePods }}
{{- $repair = ternary "in-place" $repair .repair.repairPods }}
{{- end }}
{{- $watches := not (has .driftWatch.interval (list "" "0" "0s")) }}
{{- $ambient := .ambient.enabled }}
{{- $reads := or (eq $repair "in-place") (and $watches .driftWatch.heal) $ambient }}
{{- $judges := or .nodeTaint.enabled .nodeCondition.enabled }}
{{- $capabilities := list }}
{{- if or $watches $judges $reads }}{{ $capabilities = list "NET_ADMIN" "SYS_ADMIN" }}{{ end }}
{{- if $reads }}{{ $capabilities = append $capabilities "SYS_PTRACE" }}{{ end }}
{{- $verbs := list }}
{{- if or $watches $repair $ambient }}{{ $verbs = append $verbs "list" }}{{ end }}
{{- if or $repair $ambient }}{{ $verbs = append $verbs "watch" }}{{ end }}
{{- if eq $repair "delete" }}{{ $verbs = append $verbs "delete" }}{{ end }}
repair: {{ $repair | quote }}
watches: {{ $watches }}
readsProcesses: {{ $reads }}
seesProcesses: {{ or $reads (eq (include "istio-cni.beside" .) "true") }}
entersPods: {{ or $watches $reads }}
annotatesPods: {{ or $ambient (eq $repair "label") }}
tellsOfPods: {{ or $watches $ambient (ne $repair "") (eq .sandboxedPods "skip") }}
podVerbs: {{ toJson $verbs }}
nodeResources: {{ ternary (list "nodes" "nodes/status") (ternary (list "nodes/status") list .nodeCondition.enabled) .nodeTaint.enabled | toJson }}
capabilities: {{ concat $capabilities .extraCapabilities | uniq | toJson }}
{{- end }}

{{/* Whether the entry may be beside the network's list: the agent then sees which runtime reads it. */}}
{{- define "istio-cni.beside" -}}
{{ and .chained (not .istioOwnedCNIConfig) (ne .install "inline") }}
{{- end }}

{{/* The ConfigMap's data, as YAML. What is not in force, or is the agent's own default, is left out. */}}
{{- define "istio-cni.config" -}}
{{- $powers := include "istio-cni.powers" . | fromYaml }}
{{- $config := dict "CHAINED_CNI_PLUGIN" .chained "EXCLUDE_NAMESPACES" (join "," .excludeNamespaces) "NATIVE_NFTABLES" .global.nativeNftables }}
{{- $_ := set $config "LOG_OUTPUT_LEVEL" (.logging.level | default .global.logging.level) }}
{{- with .cniConfFileName }}{{ $_ := set $config "CNI_CONF_NAME" . }}{{ end }}
{{- if and .istioOwnedCNIConfig .chained }}
{{- $_ := set $config "ISTIO_OWNED_CNI_CONFIG" true }}
{{- with .istioOwnedCNIConfigFileName }}{{ $_ := set $config "ISTIO_OWNED_CNI_CONFIG_FILENAME" . }}{{ end }}
{{- end }}
{{- if eq (include "istio-cni.beside" .) "true" }}{{ $_ := set $config "CNI_INSTALL" .install }}{{ end }}
{{- if eq (toString .readyBeforeCalled | default (and (not .chained) (eq .provider "multus") | toString)) "true" }}{{ $_ := set $config "READY_BEFORE_CALLED" true }}{{ end }}
{{- if and .nftSets .global.nativeNftables }}{{ $_ := set $config "NFT_SETS" true }}{{ end }}
{{- if .strictCapture }}{{ $_ := set $config "STRICT_CAPTURE" true }}{{ end }}
{{- with .acceptedRules }}{{ $_ := set $config "ACCEPTED_RULES" (join "; " .) }}{{ end }}
{{- if not .acceptRulesOfPods }}{{ $_ := set $config "ACCEPT_RULES_OF_PODS" false }}{{ end }}
{{- $usual := "gvisor,gvisor-*,runsc,runsc-*,kata,kata-*,firecracker" }}
{{- if ne (join "," .sandboxedRuntimes) $usual }}{{ $_ := set $config "SANDBOXED_RUNTIMES" (join "," .sandboxedRuntimes | default "none") }}{{ end }}
{{- if ne .sandboxedPods "refuse" }}{{ $_ := set $config "SANDBOXED_PODS" .sandboxedPods }}{{ end }}
{{- if .ambient.enabled }}
{{- $_ := set $config "AMBIENT_ENABLED" true }}
{{- with .ambient.enablementSelectors }}{{ $_ := set $config "AMBIENT_ENABLEMENT_SELECTOR" (toJson .) }}{{ end }}
{{- if not .ambient.dnsCapture }}{{ $_ := set $config "AMBIENT_DNS_CAPTURE" false }}{{ end }}
{{- if not .ambient.ipv6 }}{{ $_ := set $config "AMBIENT_IPV6" false }}{{ end }}
{{- if .ambient.captureScope }}{{ $_ := set $config "AMBIENT_CAPTURE_SCOPE" true }}{{ end }}
{{- with .ambient.keepConnections }}{{ $_ := set $config "AMBIENT_KEEP_CONNECTIONS" . }}{{ end }}
{{- if .ambient.ztunnelCanary }}{{ $_ := set $config "AMBIENT_ZTUNNEL_CANARY" true }}{{ end }}
{{- end }}
{{- if $powers.watches }}{{ $_ := set $config "DRIFT_WATCH_INTERVAL" .driftWatch.interval }}{{ end }}
{{- if and $powers.watches .driftWatch.heal }}{{ $_ := set $config "DRIFT_HEAL" true }}{{ end }}
{{- if .nodeTaint.enabled }}{{ $_ := set $config "NODE_TAINT" true }}{{ end }}
{{- if and .nodeTaint.enabled (ne .nodeTaint.key "cni.istio.io/not-ready") }}{{ $_ := set $config "TAINT_KEY" .nodeTaint.key }}{{ end }}
{{- if and .nodeCondition.enabled (not .nodeTaint.enabled) }}{{ $_ := set $config "NODE_CONDITION" true }}{{ end }}
{{- if $powers.repair }}
{{- $_ := set $config (get (dict "in-place" "REPAIR_REPAIR_PODS" "delete" "REPAIR_DELETE_PODS" "label" "REPAIR_LABEL_PODS") $powers.repair) true }}
{{- if ne .repair.initContainerName "istio-validation" }}{{ $_ := set $config "REPAIR_INIT_CONTAINER_NAME" .repair.initContainerName }}{{ end }}
{{- end }}
{{- if eq $powers.repair "label" }}
{{- if ne .repair.brokenPodLabelKey "cni.istio.io/uninitialized" }}{{ $_ := set $config "REPAIR_BROKEN_POD_LABEL_KEY" .repair.brokenPodLabelKey }}{{ end }}
{{- if ne (toString .repair.brokenPodLabelValue) "true" }}{{ $_ := set $config "REPAIR_BROKEN_POD_LABEL_VALUE" .repair.brokenPodLabelValue }}{{ end }}
{{- end }}
{{- if not .pluginToken.enabled }}
{{- $_ := set $config "PLUGIN_SERVICE_ACCOUNT" "" }}
{{- else if ne .pluginToken.lifetime "24h" }}
{{- $_ := set $config "PLUGIN_TOKEN_LIFETIME" .pluginToken.lifetime }}
{{- end }}
{{- if ne (int .healthPort) 8000 }}{{ $_ := set $config "HEALTH_PORT" .healthPort }}{{ end }}
{{- if ne (int .monitoringPort) 15014 }}{{ $_ := set $config "MONITORING_PORT" .monitoringPort }}{{ end }}
{{- with .monitoringAddress }}{{ $_ := set $config "MONITORING_ADDRESS" . }}{{ end }}
{{- if not .landlock }}{{ $_ := set $config "LANDLOCK" false }}{{ end }}
{{- $_ := include "istio-cni.merge" (dict "into" $config "from" .env) }}
{{- range $name, $value := $config }}
{{ $name }}: {{ include "istio-cni.scalar" (toString $value) }}
{{- end }}
{{- end }}

{{/* A string of YAML: with quotes where it would be something else without. */}}
{{- define "istio-cni.scalar" }}
{{- if and (regexMatch "^([a-z][a-z-]*|[0-9]+[smh])$" .) (not (has . (list "true" "false" "null" "yes" "no" "on" "off" "y" "n"))) -}}
{{ . }}
{{- else -}}
{{ quote . }}
{{- end }}
{{- end }}

{{/* A hash of what the agent reads only when it starts. It follows the rest by itself, without a rollout. */}}
{{- define "istio-cni.checksum" }}
{{- $config := include "istio-cni.config" . | fromYaml }}
{{- range list "EXCLUDE_NAMESPACES" "ACCEPTED_RULES" "ACCEPT_RULES_OF_PODS" "NATIVE_NFTABLES" "NFT_SETS" "SANDBOXED_PODS" "SANDBOXED_RUNTIMES" "STRICT_CAPTURE" "CNI_NETWORK_CONFIG" "LOG_LEVEL" "LOG_OUTPUT_LEVEL" "DRIFT_WATCH_INTERVAL" "DRIFT_HEAL" "ISTIO_OUTBOUND_OWNER_GROUPS" "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE" "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR" }}
{{- $_ := unset $config . }}
{{- end }}
{{- toYaml $config | sha256sum }}
{{- end }}

{{/* Labels of every object, a line each: also those that Istio's objects have, because selectors may use them. `more` wins. */}}
{{- define "istio-cni.labels" -}}
{{- $labels := dict
  "k8s-app" "istio-cni-node"
  "app" "istio-cni"
  "app.kubernetes.io/name" "istio-cni"
  "app.kubernetes.io/part-of" "istio"
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version)
  "release" .root.Release.Name
  "istio.io/rev" (.values.revision | default "default")
  "install.operator.istio.io/owning-resource" (.values.ownerName | default "unknown")
  "operator.istio.io/component" "Cni"
}}
{{- mergeOverwrite $labels (.more | default dict) | toYaml }}
{{- end }}

{{/* The container's resources: empty entries left out. */}}
{{- define "istio-cni.resources" }}
{{- $given := .resources | default .global.defaultResources }}
{{- $resources := dict "requests" (dict "cpu" "10m" "memory" "24Mi") }}
{{- if $given }}
{{- range $kind, $amounts := $given }}
{{- if and (kindIs "map" $amounts) (hasKey $resources $kind) }}
{{- range $name, $amount := $amounts }}{{ $_ := set (get $resources $kind) $name $amount }}{{ end }}
{{- else }}
{{- $_ := set $resources $kind $amounts }}
{{- end }}
{{- end }}
{{- else }}
{{- $_ := set $resources "limits" (dict "memory" "64Mi") }}
{{- end }}
{{- range $kind, $amounts := $resources }}
{{- if kindIs "map" $amounts }}
{{- range $name, $amount := $amounts }}
{{- if not $amount }}{{ $_ := unset $amounts $name }}{{ end }}
{{- end }}
{{- end }}
{{- if not $amounts }}{{ $_ := unset $resources $kind }}{{ end }}
{{- end }}
{{- range $kind, $amounts := $resources }}
{{- if kindIs "map" $amounts }}
{{ $kind }}: {
{{- $comma := "" }}
{{- range $name, $amount := $amounts }}{{ $comma }}{{ $name }}: {{ $amount }}{{ $comma = ", " }}{{ end }}}
{{- else }}
{{ $kind }}: {{ toJson $amounts }}
{{- end }}
{{- end }}
{{- end }}
