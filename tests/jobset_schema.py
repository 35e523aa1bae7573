"""The fields of a JobSet (jobset.x-k8s.io/v1alpha2) and of a Kubernetes Job that such a file may use, by their API references.

A dict is an object with these fields, a list an array of its element (or of these strings), a tuple a choice of strings, a type that type;
ANY is not looked into.
"""

ANY = object()
RESTARTS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
METADATA = {"name": str, "namespace": str, "labels": ANY, "annotations": ANY}
CONTAINER = {
    "name": str,
    "image": str,
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str, "apiVersion": str}}}],
    "ports": [{"name": str, "containerPort": int, "protocol": ("TCP", "UDP")}],
    "resources": {"limits": ANY, "requests": ANY},
    "securityContext": ANY,
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool, "subPath": str}],
}
POD = {
    "restartPolicy": ("Never", "OnFailure"),
    "terminationGracePeriodSeconds": int,
    "tolerations": [{"key": str, "operator": ("Exists", "Equal"), "value": str, "effect": ("NoSchedule", "NoExecute", "PreferNoSchedule")}],
    "nodeSelector": ANY,
    "affinity": ANY,
    "hostNetwork": bool,
    "priorityClassName": str,
    "schedulerName": str,
    "containers": [CONTAINER],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str, "sizeLimit": str}}],
}
JOB = {
    "completionMode": ("Indexed", "NonIndexed"),
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "activeDeadlineSeconds": int,
    "podFailurePolicy": {
        "rules": [
            {
                "action": ("FailJob", "FailIndex", "Ignore", "Count"),
                "onExitCodes": {"containerName": str, "operator": ("In", "NotIn"), "values": [int]},
                "onPodConditions": [{"type": str, "status": ("True", "False", "Unknown")}],
            }
        ]
    },
    "template": {"metadata": METADATA, "spec": POD},
}
JOBSET = {
    "apiVersion": ("jobset.x-k8s.io/v1alpha2",),
    "kind": ("JobSet",),
    "metadata": METADATA,
    "spec": {
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"metadata": METADATA, "spec": JOB}}],
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate"),
            "rules": [{"name": str, "action": RESTARTS, "onJobFailureReasons": list(REASONS), "targetReplicatedJobs": [str]}],
        },
        "successPolicy": {"operator": ("All", "Any"), "targetReplicatedJobs": [str]},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}


def problems(found, schema=JOBSET, path=""):
    """Every place where `found` is not as the schema says."""
    if schema is ANY:
        return []
    if isinstance(schema, dict):
        if not isinstance(found, dict):
            return [f"{path}: not an object"]
        unknown = [f"{path}.{key}: unknown field" for key in found if key not in schema]
        return unknown + [p for key, value in found.items() if key in schema for p in problems(value, schema[key], f"{path}.{key}")]
    if isinstance(schema, list):
        if not isinstance(found, list):
            return [f"{path}: not a list"]
        element = tuple(schema) if isinstance(schema[0], str) else schema[0]
        return [p for n, value in enumerate(found) for p in problems(value, element, f"{path}[{n}]")]
    if isinstance(schema, tuple):
        return [] if found in schema else [f"{path}: {found!r} is not one of {', '.join(schema)}"]
    return [] if type(found) is schema else [f"{path}: {found!r} is no {schema.__name__}"]
