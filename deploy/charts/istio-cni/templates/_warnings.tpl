{{/* What was set and has no effect, or less than one may think: a line each, with the value's name first. */}}
{{- define "istio-cni.warnings" }}
{{- $values := .values }}
{{- $powers := include "istio-cni.powers" $values | fromYaml }}
{{- $defaults := .root.Files.Get "files/defaults.yaml" | fromYaml }}
{{- $warnings := $values._ignored }}
{{- $repair := $values.repair }}
{{- $lessened := dict "repairPods" "" "deletePods" "repairPods wins" "labelPods" "repairPods or deletePods wins" }}
{{- range $name, $because := $lessened }}
{{- if and (get $repair $name) (not $repair.enabled) (ne (get $repair $name) (get $defaults.repair $name)) }}
{{- $warnings = append $warnings (printf "repair.%s: repair.enabled is false" $name) }}
{{- else if and (get $repair $name) $repair.enabled $because (ne $powers.repair (trimSuffix "Pods" $name)) }}
{{- $warnings = append $warnings (printf "repair.%s: %s" $name $because) }}
{{- end }}
{{- end }}
{{- range $name := list "brokenPodLabelKey" "brokenPodLabelValue" }}
{{- if and (ne (get $repair $name | toString) (get $defaults.repair $name)) (ne $powers.repair "label") }}
{{- $warnings = append $warnings (printf "repair.%s: broken pods are not labelled" $name) }}
{{- end }}
{{- end }}
{{- if and (ne $repair.initContainerName $defaults.repair.initContainerName) (not $powers.repair) }}
{{- $warnings = append $warnings "repair.initContainerName: nothing is done with broken pods" }}
{{- end }}
{{- range $name := list "hub" "tag" }}
{{- if get $repair $name }}{{ $warnings = append $warnings (printf "repair.%s: the repair is part of the agent, and has no image of its own" $name) }}{{ end }}
{{- end }}
{{- if and (ne $values.install "inline") (ne (include "istio-cni.beside" $values) "true") }}
{{- $warnings = append $warnings "install: the entry is in a file of its own (chained is false), or in a copy in front (istioOwnedCNIConfig)" }}
{{- end }}
{{- if and $values.istioOwnedCNIConfig (not $values.chained) }}
{{- $warnings = append $warnings "istioOwnedCNIConfig: chained is false" }}
{{- end }}
{{- if and $values.istioOwnedCNIConfigFileName (not (and $values.istioOwnedCNIConfig $values.chained)) }}
{{- $warnings = append $warnings "istioOwnedCNIConfigFileName: no copy is put in front (istioOwnedCNIConfig with chained)" }}
{{- end }}
{{- if and $values.nftSets (not $values.global.nativeNftables) }}
{{- $warnings = append $warnings "nftSets: only native nftables rules have sets, and global.nativeNftables is false" }}
{{- end }}
{{- if and $values.driftWatch.heal (not $powers.watches) }}
{{- $warnings = append $warnings "driftWatch.heal: nothing is watched, driftWatch.interval is not set" }}
{{- end }}
{{- if and $values.prometheusRule.enabled (not $powers.watches) }}
{{- $warnings = append $warnings "prometheusRule.enabled: alerts about running pods that are not redirected, drifted or unknown never fire, driftWatch.interval is not set" }}
{{- end }}
{{- if and $values.global.networkPolicy.enabled $values.hostNetwork }}
{{- $warnings = append $warnings "global.networkPolicy.enabled: Kubernetes applies no NetworkPolicy to pods on the node's network, and hostNetwork is true" }}
{{- end }}
{{- if and (ne $values.networkAttachmentDefinition.namespace $defaults.networkAttachmentDefinition.namespace) (ne $values.provider "multus") }}
{{- $warnings = append $warnings "networkAttachmentDefinition.namespace: provider is not multus" }}
{{- end }}
{{- if and (ne $values.cniNetnsDir $defaults.cniNetnsDir) (not $powers.entersPods) (ne $values.platform "minikube") }}
{{- $warnings = append $warnings "cniNetnsDir: only the drift watch and repairs in place look there" }}
{{- end }}
{{- if and (not $values.useAppArmorAnnotation) (not $powers.readsProcesses) }}
{{- $warnings = append $warnings "useAppArmorAnnotation: the agent reads nothing of other processes, and runs under the runtime's AppArmor profile" }}
{{- end }}
{{- if and (ne $values.pluginToken.lifetime $defaults.pluginToken.lifetime) (not $values.pluginToken.enabled) }}
{{- $warnings = append $warnings "pluginToken.lifetime: pluginToken.enabled is false" }}
{{- end }}
{{- if and (ne (int $values.resourceQuotas.pods) (int $defaults.resourceQuotas.pods)) (not $values.resourceQuotas.enabled) }}
{{- $warnings = append $warnings "resourceQuotas.pods: resourceQuotas.enabled is false" }}
{{- end }}
{{- if and (ne $values.nodeTaint.key $defaults.nodeTaint.key) (not (or $values.nodeTaint.enabled $values.taintController.enabled $values.ownNodePolicy.enabled)) }}
{{- $warnings = append $warnings "nodeTaint.key: nodeTaint.enabled, taintController.enabled and ownNodePolicy.enabled are false" }}
{{- end }}
{{- if not $values.taintController.enabled }}
{{- range $name := list "replicas" "after" "selectors" "healthPort" "monitoringPort" }}
{{- if ne (get $values.taintController $name | toString) (get $defaults.taintController $name | toString) }}
{{- $warnings = append $warnings (printf "taintController.%s: taintController.enabled is false" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $feature := list "podMonitor" "prometheusRule" "grafanaDashboard" }}
{{- $given := get $values $feature }}
{{- if not (and $given.enabled (gt (int $values.monitoringPort) 0)) }}
{{- $because := ternary "monitoringPort is 0" (printf "%s.enabled is false" $feature) $given.enabled }}
{{- range $name, $default := get $defaults $feature }}
{{- if ne (get $given $name | toString) ($default | toString) }}
{{- $warnings = append $warnings (printf "%s.%s: %s" $feature $name $because) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $values.monitoringAddress (le (int $values.monitoringPort) 0) }}
{{- $warnings = append $warnings "monitoringAddress: monitoringPort is 0" }}
{{- end }}
{{- range $name := list "compatibilityVersion" "profile" }}
{{- with get $values $name | default (get $values.global $name) }}
{{- if not (or (hasPrefix "platform-" (toString .)) (and (eq $name "profile") (eq . "ambient"))) }}
{{- $warnings = append $warnings (printf "%s: it changes nothing of the sidecars' plugin" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (has $values.provider (list "default" "multus" "")) }}
{{- $warnings = append $warnings (printf "provider: %s is the same as default" $values.provider) }}
{{- end }}
{{- $useless := dict "configDir" "no part of the agent reads such a directory" "reconcileIptablesOnStartup" "the agent always corrects pods' rules, also later" }}
{{- $_ := set $useless "shareHostNetworkNamespace" "hostNetwork decides, and probes are let through either way" }}
{{- $_ := set $useless "enableAmbientDetectionRetry" "the plugin always tries again" }}
{{- range $name, $value := $values.ambient }}
{{- $because := get $useless $name | default (ternary "" "ambient.enabled is false" $values.ambient.enabled) }}
{{- if and $because (hasKey $defaults.ambient $name) (ne ($value | toString) (get $defaults.ambient $name | toString)) }}
{{- $warnings = append $warnings (printf "ambient.%s: %s" $name $because) }}
{{- end }}
{{- end }}
{{- $choice := include "istio-cni.image-choice" . | fromYaml }}
{{- $image := $choice.image }}
{{- $tag := $values.tag | default $values.global.tag | toString }}
{{- $variant := $values.variant | default $values.global.variant | toString }}
{{- with $choice.istios }}
{{- $warnings = append $warnings (printf "hub, tag and image: %s would have been pulled, which is Istio's or a copy of it and holds another program; the image is %s" . $image) }}
{{- else }}
{{- if and $tag (not (hasSuffix (printf ":%s" $tag) (trimSuffix (printf "-%s" $variant) $image))) }}
{{- $warnings = append $warnings (printf "tag: without a hub of your own, or as one of Istio's, it is ignored; the image is %s" $image) }}
{{- end }}
{{- if and $variant (not (hasSuffix (printf "-%s" $variant) $image)) }}
{{- $warnings = append $warnings (printf "variant: without a hub and a tag of your own it is ignored; the image is %s" $image) }}
{{- end }}
{{- end }}
{{- range $warnings }}
- {{ . }}
{{- end }}
{{- end }}
