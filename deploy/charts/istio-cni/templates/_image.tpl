{{/* The image, after `istio-cni.values` has refused what `istio-cni.image-choice` finds wrong. */}}
{{- define "istio-cni.image" }}
{{- get (include "istio-cni.image-choice" . | fromYaml) "image" }}
{{- end }}

{{/*
Which image runs: "image"; "istios", what Istio's chart would have pulled instead, if that is Istio's or a copy; "problem", if it cannot be
determined who made it. Istio's image holds another program, and mirrors give it any name. So this project's are those under a hub that was
set for them, and those with this chart's version as tag, which Istio does not have.
*/}}
{{- define "istio-cni.image-choice" }}
{{- $image := .values.image }}
{{- $version := .root.Chart.AppVersion }}
{{- $own := include "istio-cni.own-hub" . | fromYaml }}
{{- $parts := include "istio-cni.image-parts" $image | fromYaml }}
{{- $another := "this project's image or a copy of Istio's, which holds another program" }}
{{- $tag := $own.tag | default $version }}
{{- $hub := $own.hub | default "localhost" }}
{{- $choice := dict }}
{{- if contains "/" $image }}
{{- $versioned := include "istio-cni.is-own-tag" (dict "root" .root "tag" $parts.tag) }}
{{- $under := and $own.asserted (hasPrefix (printf "%s/" (lower $own.hub)) $parts.repository) (not (include "istio-cni.is-mirrors-name" $parts.name)) }}
{{- $copied := or (include "istio-cni.is-istios" $parts.repository) (include "istio-cni.is-istios-tag" (dict "root" .root "tag" $parts.tag)) }}
{{- $doubtful := or (include "istio-cni.is-istios-folder" $parts.repository) (include "istio-cni.is-floating-tag" $parts.tag) }}
{{- if and (not $copied) (or $versioned (and $under (not $doubtful))) }}
{{- $_ := set $choice "image" $image }}
{{- else if and $under (not $copied) }}
{{- $_ := set $choice "problem" (printf "image: cannot determine whether %s is %s; give it the tag %s, which Istio does not have, also in front of a digest" $image $another $version) }}
{{- else if and $own.asserted (or $copied (regexMatch "install-cni|istio" $parts.path)) }}
{{- $_ := set $choice "image" (printf "%s/install-cni:%s" $hub $tag) }}
{{- $_ := set $choice "istios" $image }}
{{- else if $copied }}
{{- $_ := set $choice "problem" (printf "image: %s is Istio's or a copy of it, which holds another program; set hub to this project's images (and tag, if not %s)" $image $version) }}
{{- else }}
{{- $_ := set $choice "problem" (printf "image: cannot determine whether %s is %s; if it is this project's, set hub to %s; if not, set hub to this project's images, and do not set image" $image $another (dir $parts.repository)) }}
{{- end }}
{{- else if regexMatch "[:@]" $image }}
{{- $_ := set $choice "problem" (printf "image: %s has a tag or digest, but no registry; set hub and tag, or the whole image with its registry" $image) }}
{{- else }}
{{- $copied := include "istio-cni.is-mirrors-name" $image }}
{{- $tagged := ternary $tag $version (ne (toString $own.hub) "") }}
{{- $_ := set $choice "image" (printf "%s/%s:%s" $hub (ternary "install-cni" $image (ne $copied "")) $tagged) }}
{{- $named := .values.hub | default .values.global.hub | trimSuffix "/" }}
{{- if and $named (or $copied (ne $named (toString $own.hub))) }}
{{- $suffixes := list (.values.tag | default .values.global.tag | toString) (.values.variant | default .values.global.variant) }}
{{- $_ := set $choice "istios" (printf "%s/%s:%s" $named $image (compact $suffixes | join "-") | trimSuffix ":") }}
{{- end }}
{{- $versioned := include "istio-cni.is-own-tag" (dict "root" .root "tag" $tagged) }}
{{- if and $own.hub (not $versioned) (or (not $own.asserted) (include "istio-cni.is-istios-folder" $own.hub) (include "istio-cni.is-floating-tag" $tagged)) }}
{{- $_ := set $choice "problem" (printf "hub and tag: cannot determine whether %s is %s; set hub to this project's images, and tag to their version (%s)" $choice.image $another $version) }}
{{- end }}
{{- end }}
{{- toYaml $choice }}
{{- end }}

{{/*
The hub of this project's images, and the tag there: of what is set under "cni", at the top level and, for all of Istio's charts, under
"global", the first that is not Istio's. "asserted": it was set for this chart, or with this chart's version.
*/}}
{{- define "istio-cni.own-hub" }}
{{- $root := .root }}
{{- $global := .values.global }}
{{- $own := dict }}
{{- range $at, $level := list (.root.Values.cni | default dict) .root.Values $global }}
{{- $is_global := eq $at 2 }}
{{- $hub := get $level "hub" | default "" | trimSuffix "/" }}
{{- $tag := get $level "tag" | default "" | toString }}
{{- $beside := ternary ($.values.tag | default $tag | toString) $tag $is_global }}
{{- $copied := include "istio-cni.is-istios" $hub }}
{{- if and $hub (not $own.hub) (not $copied) (not (include "istio-cni.is-istios-tag" (dict "root" $root "tag" $beside))) }}
{{- $_ := set $own "hub" $hub }}
{{- $_ := set $own "asserted" (or (not $is_global) (ne "" (include "istio-cni.is-own-tag" (dict "root" $root "tag" $beside)))) }}
{{- end }}
{{- if and $tag (not $own.tag) (not (and $is_global $copied)) (not (include "istio-cni.is-istios-tag" (dict "root" $root "tag" $tag))) }}
{{- $variant := get $level "variant" | default "" }}
{{- $_ := set $own "tag" (ternary $tag (printf "%s-%s" $tag $variant) (empty $variant)) }}
{{- end }}
{{- end }}
{{- toYaml $own }}
{{- end }}

{{/* The parts of an image's name, in lower case but for the tag: repository, its path without the registry, its last part, and the tag. */}}
{{- define "istio-cni.image-parts" }}
{{- $undigested := . | splitList "@" | first }}
{{- $tag := regexFind ":[^/]*$" $undigested }}
{{- $repository := trimSuffix $tag $undigested | lower }}
{{- $path := regexReplaceAll "^[^/]*[.:][^/]*/" $repository "" }}
{{- dict "repository" $repository "path" $path "name" (splitList "/" $path | last) "tag" (trimPrefix ":" $tag) | toYaml }}
{{- end }}

{{/* Whether an image or a hub is in one of Istio's registries. */}}
{{- define "istio-cni.is-istios" }}
{{- if regexMatch "^(((registry-1\\.|index\\.)?docker\\.io/)?istio|gcr\\.io/istio-[a-z]+|registry\\.istio\\.io)(/|$)" (lower .) }}yes{{ end }}
{{- end }}

{{/* Whether a mirror keeps Istio's images there, as far as folders show that. */}}
{{- define "istio-cni.is-istios-folder" }}
{{- if regexMatch "/istio(-release|-testing)?(/|$)" (lower .) }}yes{{ end }}
{{- end }}

{{/* Whether the last part of a repository is a name that mirrors give Istio's image. */}}
{{- define "istio-cni.is-mirrors-name" }}
{{- if regexMatch "(istio|mirror).*install-cni|^install-cni-(debug|distroless|fips)|istio-cni" (lower .) }}yes{{ end }}
{{- end }}

{{/* Whether a tag is a version of Istio. This project's versions are others. */}}
{{- define "istio-cni.is-istios-tag" }}
{{- if and (regexMatch "^v?1\\.[1-9][0-9]([.-]|$)" .tag) (not (include "istio-cni.is-own-tag" .)) }}yes{{ end }}
{{- end }}

{{/* Whether a tag is this chart's version, also with a variant. */}}
{{- define "istio-cni.is-own-tag" }}
{{- if or (eq .tag .root.Chart.AppVersion) (hasPrefix (printf "%s-" .root.Chart.AppVersion) .tag) }}yes{{ end }}
{{- end }}

{{/* Whether a tag follows the newest image, Istio's as well as this project's. */}}
{{- define "istio-cni.is-floating-tag" }}
{{- if regexMatch "(^|[.-])latest([.-]|$)" . }}yes{{ end }}
{{- end }}
