{{/* Objects of deploy/kubernetes (the links `base` and `components`), changed by values. Each `define` changes maps in place. */}}

{{/* The objects of a file, those of some kinds left out: dict "root" $ "file" "base/node.yaml" → {"items": […]} */}}
{{- define "kvtier.objects" -}}
{{- $items := list -}}
{{- range splitList "\n---\n" (.root.Files.Get .file) -}}
{{- $object := fromYaml (printf "%s\n" .) -}}
{{- $_ := set $object.metadata "namespace" $.root.Release.Namespace -}}
{{- $own := dict "app.kubernetes.io/instance" $.root.Release.Name "app.kubernetes.io/managed-by" $.root.Release.Service "helm.sh/chart" (printf "%s-%s" $.root.Chart.Name $.root.Chart.Version) -}}
{{- $_ := set $object.metadata "labels" (merge (dict) ($object.metadata.labels | default dict) $own) -}}
{{- $items = append $items $object -}}
{{- end -}}
{{- dict "items" $items | toYaml -}}
{{- end -}}

{{/* A section map as variables: {host: {size: 1GiB}} → [{name: KVTIER_HOST__SIZE, value: 1GiB}] */}}
{{- define "kvtier.variables" -}}
{{- $found := list -}}
{{- range $section, $options := . -}}
{{- range $option, $value := $options -}}
{{- $text := kindIs "string" $value | ternary (toString $value) (toJson $value) -}}
{{- $found = append $found (dict "name" (printf "KVTIER_%s__%s" (upper $section) (upper $option)) "value" $text) -}}
{{- end -}}
{{- end -}}
{{- dict "env" $found | toYaml -}}
{{- end -}}

{{/* `env` with these variables: those of the same name are replaced. dict "container" … "env" […] */}}
{{- define "kvtier.environment" -}}
{{- $names := dict -}}
{{- range .env }}{{ $_ := set $names .name true }}{{ end -}}
{{- $kept := list -}}
{{- range .container.env }}{{ if not (hasKey $names .name) }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- if or $kept .env }}{{ $_ := set .container "env" (concat $kept .env) }}{{ end -}}
{{- end -}}

{{/* The volume of this name is another: dict "pod" … "volume" {…} */}}
{{- define "kvtier.volume" -}}
{{- $volumes := list -}}
{{- range .pod.volumes }}{{ $volumes = append $volumes (eq .name $.volume.name | ternary $.volume .) }}{{ end -}}
{{- $_ := set .pod "volumes" $volumes -}}
{{- end -}}

{{/* A list of {name: …} without one: dict "of" {…} "field" "volumes" "name" "model" */}}
{{- define "kvtier.without" -}}
{{- $kept := list -}}
{{- range index .of .field }}{{ if ne .name $.name }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $_ := set .of .field $kept -}}
{{- end -}}

{{/* What all components' values do to a workload: dict "root" $ "object" … "values" … */}}
{{- define "kvtier.workload" -}}
{{- $root := .root }}{{ $values := .values }}{{ $template := .object.spec.template }}{{ $pod := $template.spec -}}
{{- $_ := set $template.metadata.labels "app.kubernetes.io/instance" $root.Release.Name -}}
{{- with $values.annotations }}{{ $_ := set $template.metadata "annotations" . }}{{ end -}}
{{- range concat ($pod.initContainers | default list) $pod.containers -}}
{{- $name := first (splitList ":" .image) -}}
{{- if hasPrefix "kvtier" $name -}}
{{- $_ := set . "image" (printf "%s%s:%s" ($root.Values.images.registry | default "") $name ($root.Values.images.tag | default $root.Chart.AppVersion)) -}}
{{- end -}}
{{- if $root.Values.images.pullPolicy }}{{ $_ := set . "imagePullPolicy" $root.Values.images.pullPolicy }}{{ end -}}
{{- end -}}
{{- with $root.Values.images.pullSecrets }}{{ $names := list }}{{ range . }}{{ $names = append $names (dict "name" .) }}{{ end }}{{ $_ := set $pod "imagePullSecrets" $names }}{{ end -}}
{{- $main := first $pod.containers -}}
{{- $variables := (include "kvtier.variables" ($values.config | default dict) | fromYaml).env | default list -}}
{{- with $root.Values.tracing.endpoint }}{{ $variables = prepend $variables (dict "name" "KVTIER_TRACING__ENDPOINT" "value" .) }}{{ end -}}
{{- include "kvtier.environment" (dict "container" $main "env" $variables) -}}
{{- include "kvtier.environment" (dict "container" $main "env" ($values.env | default list)) -}}
{{- range $main.env -}}
{{- with (.valueFrom | default dict).secretKeyRef -}}
{{- if eq .name "kvtier-tokens" }}{{ $_ := set . "name" ($root.Values.secrets.tokens | default .name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $pod.volumes -}}
{{- with .secret -}}
{{- if eq .secretName "kvtier-event-keys" }}{{ $_ := set . "secretName" $root.Values.secrets.eventKeys }}{{ end -}}
{{- if eq .secretName "kvtier-peer-key" }}{{ $_ := set . "secretName" ($root.Values.secrets.peerKey | default "kvtier-peer-key") }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $_ := mergeOverwrite $main ($values.container | default dict | deepCopy) -}}
{{- $_ := mergeOverwrite $pod ($values.pod | default dict | deepCopy) -}}
{{- end -}}

{{/* Values of JSON patches in a component, by path: dict "root" $ "file" … "name" the patched object's → {path: value} */}}
{{- define "kvtier.patched" -}}
{{- $found := dict -}}
{{- range (fromYaml (.root.Files.Get .file)).patches -}}
{{- if eq .target.name $.name -}}
{{- range fromYamlArray .patch }}{{ if ne .op "test" }}{{ $_ := set $found (printf "%s%s" (eq .op "add" | ternary "+" "") .path) (.value | default "") }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $found | toYaml -}}
{{- end -}}

{{- define "kvtier.hex" -}}{{ printf "%x" (randBytes 32 | b64dec) }}{{- end -}}

{{/* Whether there are routers: with engines of this release, or of yours */}}
{{- define "kvtier.routes" -}}{{ if and .Values.router.enabled (or .Values.engine.enabled .Values.router.engines) }}true{{ end }}{{- end -}}
