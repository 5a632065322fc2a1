use super::table::{SETTINGS, Status};
use super::*;
use cni_core::enablement::Enablement;
use redirect_core::Family;
use redirect_core::ambient::ProbeSources;
use settings_cli::{LineRequest, ParsedArgs};
use zds::Newcomer;

const REQUIRED: [(&str, &str); 2] =
    [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")];

fn read(args: &[&str], env: &[(&str, &str)]) -> Result<(Settings, Vec<String>), Vec<String>> {
    let given = words(args);
    let env: Vec<(String, String)> =
        REQUIRED.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Settings::read(&given, &env).map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

fn words(args: &[&str]) -> ParsedArgs {
    match command_line().read(args.iter().map(Into::into)) {
        Ok(LineRequest::Work(words)) => words,
        other => panic!("{other:?}"),
    }
}

fn printed(args: &[&str]) -> String {
    match command_line().read(args.iter().map(Into::into)) {
        Ok(LineRequest::Print(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn settings(args: &[&str], env: &[(&str, &str)]) -> Settings {
    read(args, env).expect("settings").0
}

fn notices(args: &[&str], env: &[(&str, &str)]) -> Vec<String> {
    read(args, env).expect("settings").1
}

#[test]
fn the_table_names_and_explains_each_setting_once() {
    let mut names: Vec<&str> = SETTINGS.iter().filter_map(|setting| setting.flag).collect();
    names.extend(SETTINGS.iter().flat_map(|setting| setting.env));
    names.extend(settings_cli::LOG_ROWS.iter().filter_map(|row| row.flag));
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
    assert!(SETTINGS.iter().all(|setting| setting.meaning.ends_with('.') && !setting.name().is_empty()));
}

#[test]
fn a_flag_is_the_lower_case_of_its_variable() {
    let own_spelling = |flag: &str| flag.starts_with("ctrlz_");
    for setting in SETTINGS {
        let Some(flag) = setting.flag.filter(|flag| !own_spelling(flag)) else { continue };
        assert_eq!(flag.to_uppercase().replace('-', "_"), setting.env[0]);
    }
}

#[test]
fn defaults_are_those_of_the_interface() {
    let settings = settings(&[], &[]);
    let Paths { source_bin, bin, net, netns, proc, run, service_account } = &settings.paths;
    let paths = [source_bin, bin, net, netns, proc, run, service_account]
        .map(|path| path.to_str().unwrap_or_default());
    assert_eq!(
        paths,
        [
            "/opt/cni/bin",
            "/host/opt/cni/bin",
            "/host/etc/cni/net.d",
            "/host/var/run/netns",
            "/host/proc",
            "/var/run/istio-cni",
            "/var/run/secrets/kubernetes.io/serviceaccount"
        ]
    );
    assert_eq!(settings.placement, EntryPlacement::Chained { pinned: None });
    assert_eq!(settings.kubeconfig.server, "https://10.0.0.1:443");
    assert_eq!(settings.kubeconfig.mode, 0o600);
    let ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
    assert_eq!(settings.kubeconfig.trust, Trust::Authority(ca.into()));
    assert_eq!((settings.serve.health, settings.serve.monitoring), ((None, 8000), Some((None, 15014))));
    assert_eq!(settings.serve.control, Some(([127, 0, 0, 1].into(), 9876)));
    assert_eq!(settings.entry.facts.log_level, "info");
    let RepairSettings { action, label, filter } = settings.repair;
    assert_eq!((action, filter.exit_code), (None, 126));
    assert_eq!(label, ("cni.istio.io/uninitialized".into(), "true".into()));
}

#[test]
fn the_drift_watch_is_off_without_an_interval() {
    assert_eq!(
        settings(&[], &[]).drift,
        DriftSettings { interval: None, heal: false, environment: Vec::new() }
    );
    for off in ["", "0", "0s"] {
        assert_eq!(settings(&[], &[("DRIFT_WATCH_INTERVAL", off)]).drift.interval, None, "{off}");
    }
    assert_eq!(
        settings(&["--drift-watch-interval=1m30s"], &[]).drift.interval,
        Some(std::time::Duration::from_secs(90))
    );
    let wide = ("ISTIO_OUTBOUND_OWNER_GROUPS", "1001");
    assert_eq!(settings(&[], &[wide]).drift.environment, [(wide.0, wide.1.to_owned())]);
    for (wrong, why) in [("5", "not a duration"), ("-1s", "not a duration"), ("10ms", "too short")] {
        let problems = read(&[], &[("DRIFT_WATCH_INTERVAL", wrong)]).expect_err("problems");
        assert!(problems[0].starts_with(&format!("DRIFT_WATCH_INTERVAL: {wrong:?}: {why}")), "{problems:?}");
    }
    let watched = ("DRIFT_WATCH_INTERVAL", "1m");
    let in_place = ("REPAIR_REPAIR_PODS", "true");
    let condition = ("NODE_CONDITION", "true");
    for (env, is_found) in [
        (&[wide][..], true),
        (&[wide, watched], false),
        (&[wide, in_place], false),
        (&[wide, condition], false),
        (&[wide, condition, ("TAINT_PROBE", "false")], true),
    ] {
        let found = notices(&[], env)
            .iter()
            .any(|notice| notice.starts_with("ISTIO_OUTBOUND_OWNER_GROUPS has no effect"));
        assert_eq!(found, is_found, "{env:?}");
    }
    let [notice] = &notices(&[], &[("MOUNTED_CNI_NETNS_DIR", "/x")])[..] else { panic!("one notice") };
    assert!(notice.contains("MOUNTED_CNI_NETNS_DIR has no effect"), "{notice}");
}

#[test]
fn flags_win_over_the_environment() {
    let env = [("MONITORING_PORT", "1"), ("CHAINED_CNI_PLUGIN", "true"), ("CNI_CONF_NAME", "a.conf")];
    let settings = settings(&["--monitoring-port=2", "--chained-cni-plugin=false"], &env);
    assert_eq!(settings.serve.monitoring, Some((None, 2)));
    assert_eq!(settings.placement, EntryPlacement::Standalone { file: "a.conf".into() });
}

#[test]
fn health_and_metrics_may_have_an_address() {
    let env = [("HEALTH_ADDRESS", "localhost"), ("MONITORING_ADDRESS", "fd00::7")];
    let serve = settings(&[], &env).serve;
    assert_eq!(serve.health, (Some([127, 0, 0, 1].into()), 8000));
    assert_eq!(serve.monitoring, Some((Some("fd00::7".parse().expect("an address")), 15014)));
    let problems = read(&["--health-address=node"], &[]).expect_err("problems");
    assert_eq!(problems, ["flag --health-address: \"node\": neither an IP address nor localhost"]);
}

#[test]
fn a_switch_may_stand_alone() {
    assert!(settings(&["--cni-conf-group-read"], &[]).conf_group_read);
    assert!(!settings(&["--cni-conf-group-read=f"], &[]).conf_group_read);
    assert!(settings(&["--skip-tls-verify"], &[]).kubeconfig.trust == Trust::Unverified);
}

#[test]
fn placements_come_from_three_settings() {
    let owned = |file: &str, pinned: Option<&str>| EntryPlacement::Owned {
        file: file.into(),
        pinned: pinned.map(Into::into),
    };
    let placement = |env: &[(&str, &str)]| settings(&[], env).placement;
    assert_eq!(
        placement(&[("CNI_CONF_NAME", "x.conflist")]),
        EntryPlacement::Chained { pinned: Some("x.conflist".into()) }
    );
    assert_eq!(placement(&[("ISTIO_OWNED_CNI_CONFIG", "true")]), owned("02-istio-cni.conflist", None));
    let env = [
        ("ISTIO_OWNED_CNI_CONFIG", "1"),
        ("ISTIO_OWNED_CNI_CONF_FILENAME", "00-a.conflist"),
        ("CNI_CONF_NAME", "b.conf"),
    ];
    assert_eq!(placement(&env), owned("00-a.conflist", Some("b.conf")));
    assert_eq!(
        placement(&[("CHAINED_CNI_PLUGIN", "false")]),
        EntryPlacement::Standalone { file: "YYY-istio-cni.conf".into() }
    );
}

#[test]
fn a_copy_of_itself_is_refused() {
    let env = [("ISTIO_OWNED_CNI_CONFIG", "true"), ("CNI_CONF_NAME", OWNED_FILE)];
    let problems = read(&[], &env).expect_err("problems");
    assert!(problems[0].contains("cannot be a copy of itself"), "{problems:?}");
}

#[test]
fn empty_values_mean_false_and_nought_and_are_reported() {
    let env = [("CHAINED_CNI_PLUGIN", ""), ("MONITORING_PORT", ""), ("NATIVE_NFTABLES", "")];
    let (settings, texts) = read(&[], &env).expect("settings");
    assert_eq!(settings.placement, EntryPlacement::Standalone { file: "YYY-istio-cni.conf".into() });
    assert_eq!(settings.serve.monitoring, None);
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts[0].starts_with("CHAINED_CNI_PLUGIN is set but empty, which means false or 0"), "{texts:?}");
}

#[test]
fn every_mistake_is_reported_at_once_with_its_name_and_value() {
    let env = [
        ("CHAINED_CNI_PLUGIN", "yes"),
        ("KUBECONFIG_MODE", "600"),
        ("MONITORING_PORT", "70000"),
        ("CNI_CONF_NAME", "../etc/passwd"),
        ("ISTIO_OWNED_CNI_CONFIG_FILENAME", "a.txt"),
    ];
    let problems = read(&["--log_output_level=loud", "--health-port=x"], &env).expect_err("problems");
    assert_eq!(problems.len(), 7, "{problems:#?}");
    let has =
        |text: &str| assert!(problems.iter().any(|problem| problem.contains(text)), "{text}: {problems:#?}");
    has("CHAINED_CNI_PLUGIN: \"yes\": neither true nor false");
    has("KUBECONFIG_MODE: \"600\": this is mode 1130");
    has("Octal needs a leading 0: 0600");
    has("MONITORING_PORT: \"70000\": not a port");
    has("CNI_CONF_NAME: \"../etc/passwd\": a file name");
    has("flag --health-port: \"x\": not a whole number");
    has("flag --log_output_level");
}

#[test]
fn a_mode_that_shows_the_plugins_token_is_mentioned() {
    for (mode, mentioned) in [
        ("0600", None),
        ("0640", None),
        ("0644", Some("0644")),
        ("0660", Some("0660")),
        ("0777", Some("0777")),
        ("511", Some("0777")),
    ] {
        let said = notices(&[], &[("KUBECONFIG_MODE", mode)]);
        let found: Vec<_> = said.iter().filter(|line| line.contains("KUBECONFIG_MODE")).collect();
        match mentioned {
            None => assert!(found.is_empty(), "{mode}: {found:?}"),
            Some(octal) => {
                assert!(
                    found.len() == 1 && found[0].contains(&format!("KUBECONFIG_MODE {octal} ")),
                    "{mode}: {found:?}"
                );
            }
        }
    }
    let said = notices(&["--kubeconfig-mode=0644"], &[]);
    assert!(said.iter().any(|line| line.starts_with("flag --kubeconfig-mode 0644 ")), "{said:?}");
}

#[test]
fn a_plugins_token_has_to_outlast_an_upgrade() {
    let problems = read(&[], &[("PLUGIN_TOKEN_LIFETIME", "10m")]).expect_err("too short");
    assert!(
        problems.iter().any(|problem| problem.contains("PLUGIN_TOKEN_LIFETIME: \"10m\": too short")),
        "{problems:?}"
    );
    let (settings, _) = read(&["--plugin-token-lifetime=6h"], &[]).expect("settings");
    assert_eq!(
        (settings.plugin.name.as_str(), settings.plugin.lifetime.as_secs()),
        ("istio-cni-plugin", 21600)
    );
}

#[test]
fn without_an_api_server_there_is_no_start() {
    let given = words(&[]);
    let problems = Settings::read(&given, &[]).expect_err("problems");
    let origins: Vec<&str> = problems.iter().map(|problem| problem.origin.as_str()).collect();
    assert_eq!(origins, ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"]);
}

/// What no address can be made of would fail every pod.
#[test]
fn an_api_server_that_cannot_be_is_no_start() {
    for (name, value, why) in [
        ("KUBERNETES_SERVICE_PORT", "https", "not a port"),
        ("KUBERNETES_SERVICE_PORT", "0", "not a port"),
        ("KUBERNETES_SERVICE_PORT", "70000", "not a port"),
        ("KUBERNETES_SERVICE_PROTOCOL", "ftp", "neither http nor https"),
        ("KUBERNETES_SERVICE_PROTOCOL", "", "neither http nor https"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1/x", "no host name"),
        ("KUBERNETES_SERVICE_HOST", "a b", "no host name"),
    ] {
        let given = words(&[]);
        let given_so = (name, value);
        let env = REQUIRED.iter().filter(|(required, _)| *required != name).chain([&given_so]);
        let env: Vec<(String, String)> =
            env.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let problems = Settings::read(&given, &env).expect_err("a problem");
        let [problem] = &problems[..] else { panic!("one problem: {problems:?}") };
        assert!(problem.to_string().starts_with(&format!("{name}: {value:?}: {why}")), "{problem}");
    }
}

#[test]
fn misspelt_names_are_reported_and_others_are_not() {
    let env = [
        ("EXCLUDE_NAMESPACE", "a"),
        ("Chained-Cni-Plugin", "false"),
        ("REPAIR_EVERYTHING", "true"),
        ("PATH", "/bin"),
        ("HOSTNAME", "n"),
        ("KUBERNETES_PORT_443_TCP", "x"),
        ("SHOP_SERVICE_HOST", "x"),
    ];
    assert_eq!(
        notices(&[], &env),
        [
            "EXCLUDE_NAMESPACE is not a setting and is ignored; did you mean EXCLUDE_NAMESPACES?",
            "Chained-Cni-Plugin is not a setting and is ignored; did you mean CHAINED_CNI_PLUGIN?",
            "REPAIR_EVERYTHING is not a setting and is ignored",
        ]
    );
}

#[test]
fn settings_without_effect_are_reported() {
    let env = [
        ("AMBIENT_RECONCILE_POD_RULES_ON_STARTUP", "true"),
        ("GOMEMLIMIT", "1"),
        ("LOG_LEVEL", "debug"),
        ("ISTIO_OWNED_CNI_CONF_FILENAME", "00-a.conflist"),
    ];
    let texts = notices(&[], &env);
    assert_eq!(texts.len(), 5, "{texts:#?}");
    let has = |text: &str| assert!(texts.iter().any(|notice| notice.contains(text)), "{text}: {texts:#?}");
    has("AMBIENT_RECONCILE_POD_RULES_ON_STARTUP has no effect: they always are");
    has("GOMEMLIMIT has no effect: it is not used");
    has("LOG_LEVEL has no effect: only a template");
    has("ISTIO_OWNED_CNI_CONF_FILENAME is understood as ISTIO_OWNED_CNI_CONFIG_FILENAME");
    has("ISTIO_OWNED_CNI_CONF_FILENAME has no effect: ISTIO_OWNED_CNI_CONFIG is false");
}

#[test]
fn ambient_mode_is_off_unless_it_is_switched_on_and_its_entry_says_so() {
    assert_eq!(settings(&[], &[]).ambient, None);
    let on = settings(&[], &[("AMBIENT_ENABLED", "true"), ("AMBIENT_DNS_CAPTURE", "false")]);
    let ambient = on.ambient.as_ref().expect("it is on");
    assert_eq!(ambient.socket.as_os_str(), "/var/run/ztunnel/ztunnel.sock");
    assert!(!ambient.defaults.dns_capture && ambient.defaults.ipv6);
    assert_eq!((&ambient.selectors, on.entry.facts.ambient_enabled), (&None, true));
    assert_eq!(on.entry.facts.enablement_selectors, serde_json::json!([]));
    let selectors = r#"[{"podSelector": {"matchLabels": {"mesh": "ambient"}}}]"#;
    let own = settings(&["--ambient-enabled"], &[("AMBIENT_ENABLEMENT_SELECTOR", selectors)]);
    let parsed: serde_json::Value = serde_json::from_str(selectors).expect("JSON");
    assert_eq!(own.entry.facts.enablement_selectors, parsed);
    assert_eq!(own.ambient.expect("it is on").selectors, Some(parsed));
}

#[test]
fn ambient_mode_is_as_set_and_probes_have_the_sources_that_are_set() {
    let ambient = |env: &[(&str, &str)]| settings(&["--ambient-enabled"], env).ambient.expect("it is on");
    let usual = ambient(&[]);
    assert_eq!(usual.defaults.probes, ProbeSources::USUAL);
    assert!(usual.routes_branch_probes && !usual.defaults.capture_scope);
    assert_eq!(usual.newcomer, Newcomer::AllPods);
    let own = ambient(&[
        ("HOST_PROBE_SNAT_IP", "169.254.8.1"),
        ("HOST_PROBE_SNAT_IPV6", "fd00::7"),
        ("AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE", "false"),
        ("AMBIENT_CAPTURE_SCOPE", "true"),
        ("AMBIENT_ZTUNNEL_CANARY", "true"),
    ]);
    assert_eq!(own.newcomer, Newcomer::NewPods);
    let sources = Family::BOTH.map(|family| own.defaults.probes.of(family).to_string());
    assert_eq!(sources, ["169.254.8.1", "fd00::7"]);
    assert!(!own.routes_branch_probes && own.defaults.capture_scope);
    let wrong = [("HOST_PROBE_SNAT_IP", "127.0.0.1"), ("HOST_PROBE_SNAT_IPV6", "169.254.8.1")];
    let problems = read(&[], &wrong).expect_err("wrong");
    for ((name, value), problem) in wrong.iter().zip(&problems) {
        assert!(
            problem.contains(name) && problem.contains(value) && problem.contains("such as"),
            "{problem}"
        );
    }
    assert_eq!(problems.len(), 2, "{problems:#?}");
}

#[test]
fn wrong_settings_of_ambient_mode_are_refused_also_while_it_is_off() {
    let env = [("AMBIENT_ENABLEMENT_SELECTOR", r#"[{"pods": {}}]"#), ("ZTUNNEL_UDS_ADDRESS", "ztunnel.sock")];
    let problems = read(&[], &env).expect_err("wrong");
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(
        problems[0].contains("AMBIENT_ENABLEMENT_SELECTOR") && problems[0].contains("pods"),
        "{problems:#?}"
    );
    assert!(
        problems[1].contains("ZTUNNEL_UDS_ADDRESS") && problems[1].contains("path of a socket"),
        "{problems:#?}"
    );
    for wrong in ["- podSelector: [", "- podSelector: {}\n---\n- podSelector: {}"] {
        let problems = read(&[], &[("AMBIENT_ENABLEMENT_SELECTOR", wrong)]).expect_err("wrong");
        assert!(problems.len() == 1 && problems[0].contains("AMBIENT_ENABLEMENT_SELECTOR"), "{problems:#?}");
    }
}

/// The defaults of Istio's chart, in its words, are the usual selectors.
#[test]
fn selectors_may_be_yaml() {
    let text = "- podSelector:\n    matchLabels:\n      istio.io/dataplane-mode: ambient\n- podSelector:\n    matchExpressions:\n    - key: \
                istio.io/dataplane-mode\n      operator: NotIn\n      values:\n      - none\n  namespaceSelector:\n    matchLabels:\n      \
                istio.io/dataplane-mode: ambient\n";
    let on = settings(&["--ambient-enabled"], &[("AMBIENT_ENABLEMENT_SELECTOR", text)]);
    let selectors = on.ambient.expect("it is on").selectors.expect("selectors");
    assert_eq!(Enablement::read(&selectors, []), Ok(Enablement::usual([])));
}

/// Istio's own, at its defaults.
const CHART: [(&str, &str); 13] = [
    ("REPAIR_ENABLED", "true"),
    ("REPAIR_REPAIR_PODS", "true"),
    ("REPAIR_LABEL_PODS", "false"),
    ("REPAIR_NODE_NAME", "n"),
    ("NODE_NAME", "n"),
    ("POD_NAME", "p"),
    ("POD_NAMESPACE", "istio-system"),
    ("ALLOW_SWITCH_TO_HOST_NS", "true"),
    ("EXCLUDE_NAMESPACES", "kube-system"),
    ("AMBIENT_ENABLED", "false"),
    ("CHAINED_CNI_PLUGIN", "true"),
    ("NATIVE_NFTABLES", "false"),
    ("GOMEMLIMIT", "1"),
];

/// A user who sets them relies on repair.
#[test]
fn unsupported_settings_of_a_chart_are_reported_once_for_each_reason() {
    let texts = notices(&["--log_output_level=info,cni-plugin:debug"], &CHART);
    assert_eq!(texts, ["ALLOW_SWITCH_TO_HOST_NS, GOMEMLIMIT have no effect: it is not used"]);
    assert_eq!(notices(&[], &[]), [""; 0]);
    assert_eq!(notices(&["--log_stacktrace_level=default:none,cni-agent:none"], &[]), [""; 0]);
    let [traces] = &notices(&["--log_stacktrace_level=default:info"], &[])[..] else { panic!("one notice") };
    assert!(traces.contains("--log_stacktrace_level has no effect"), "{traces}");
}

#[test]
fn help_and_log_agree() {
    let help = printed(&["--help"]).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut count = 0;
    for setting in SETTINGS {
        assert!(help.contains(&setting.description()), "{}: {help}", setting.name());
        count += usize::from(setting.description().contains("not implemented"));
    }
    assert!(count >= 1, "{count} settings that are not implemented");
}

#[test]
fn the_entry_follows_the_settings() {
    let env = [
        ("EXCLUDE_NAMESPACES", " a, ,b "),
        ("POD_NAMESPACE", "istio-system"),
        ("NATIVE_NFTABLES", "1"),
        ("NFT_SETS", "true"),
        ("STRICT_CAPTURE", "true"),
        ("ACCEPTED_RULES", "comment=ours; chain=BACKUP"),
        ("ACCEPT_RULES_OF_PODS", "false"),
        ("SANDBOXED_RUNTIMES", "vm, kata-*"),
        ("SANDBOXED_PODS", "skip"),
    ];
    let facts = settings(&["--log_output_level=cni-plugin:debug"], &env).entry.facts;
    assert_eq!((&*facts.accepted_rules, facts.accept_rules_of_pods), ("comment=ours; chain=BACKUP", false));
    assert_eq!(facts.exclude_namespaces, ["a", "b"]);
    assert_eq!(
        (facts.log_level.as_str(), facts.native_nftables, facts.nft_sets, facts.strict_capture),
        ("debug", true, true, true)
    );
    assert_eq!(
        (&facts.sandboxed.names[..], facts.sandboxed.pods),
        (&["vm".into(), "kata-*".into()][..], cni_core::sandboxed::SandboxedPods::Skip)
    );
    assert_eq!(settings(&[], &[]).entry.facts.sandboxed, cni_core::sandboxed::SandboxedRuntimes::default());
}

#[test]
fn the_entry_shows_whether_the_agent_is_on_the_hosts_network() {
    let says = |env: &[(&str, &str)]| {
        let Settings { entry, paths, kubeconfig, .. } = settings(&[], env);
        entry
            .entry(&paths, &kubeconfig, "n", None)
            .expect("an entry")
            .standalone()
            .contains("\"agent_host_network\": true")
    };
    assert!(says(&[("POD_IP", "10.0.0.7"), ("HOST_IP", "10.0.0.7")]));
    assert!(!says(&[("POD_IP", "10.244.1.9"), ("HOST_IP", "10.0.0.7")]));
    for unknown in [&[] as &[(&str, &str)], &[("POD_IP", "10.0.0.7")], &[("POD_IP", ""), ("HOST_IP", "")]] {
        assert!(!says(unknown), "{unknown:?}");
    }
}

#[test]
fn a_template_is_filled_from_the_settings() {
    let template = r#"{"type":"istio-cni","kc":"__KUBECONFIG_FILEPATH__","bin":"__CNI_BIN_DIR__","host":"__KUBERNETES_SERVICE_HOST__","level":"__LOG_LEVEL__"}"#;
    let Settings { entry, paths, kubeconfig, .. } = settings(&[], &[("CNI_NETWORK_CONFIG", template)]);
    let made = entry.entry(&paths, &kubeconfig, "n", None).expect("an entry").standalone();
    let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
    assert_eq!(made["kc"], "/var/run/istio-cni/istio-cni-kubeconfig");
    assert_eq!(
        (&made["bin"], &made["host"], &made["level"]),
        (&"/opt/cni/bin".into(), &"10.0.0.1".into(), &"warn".into())
    );
    let file = settings(&[], &[("CNI_NETWORK_CONFIG", template), ("CNI_NETWORK_CONFIG_FILE", "/t")]).entry;
    assert_eq!(file.template, Some(TemplateSource::File("/t".into())));
}

#[test]
fn an_ipv6_server_is_bracketed() {
    let given = words(&[]);
    let env = [
        ("KUBERNETES_SERVICE_HOST", "fd00::1"),
        ("KUBERNETES_SERVICE_PORT", "6443"),
        ("KUBERNETES_SERVICE_PROTOCOL", "http"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (settings, _) = Settings::read(&given, &env).expect("settings");
    assert_eq!(settings.kubeconfig.server, "http://[fd00::1]:6443");
}

#[test]
fn every_flag_completes_in_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = printed(&["completion", shell]);
        for flag in SETTINGS.iter().filter_map(|setting| setting.flag) {
            assert!(text.contains(flag), "{shell}: {flag}");
        }
    }
    assert!(command_line().read(["completion".into()]).is_err());
}

#[test]
fn what_is_not_understood_is_found_with_everything_else() {
    let problems =
        read(&["--frob", "--health-port=x", "--skip-tls-verify", "yes"], &[]).expect_err("problems");
    let has =
        |text: &str| assert!(problems.iter().any(|problem| problem.contains(text)), "{text}: {problems:#?}");
    has("command line: \"--frob\": is not a flag; see --help");
    has("write --skip-tls-verify=true");
    has("flag --health-port: \"x\": not a whole number");
    assert_eq!(problems.len(), 3, "{problems:#?}");
}

#[test]
fn commands_take_flags_on_either_side() {
    for line in [
        "install --once --cni-conf-name a.conf",
        "--cni-conf-name a.conf install --once",
        "--skip-tls-verify --cni-conf-name=a.conf install --once",
    ] {
        let words = words(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(AgentCommand::of(&words), AgentCommand::Once, "{line}");
        assert_eq!(words.flags.get("cni-conf-name").map(String::as_str), Some("a.conf"), "{line}");
        assert!(words.refused.is_empty(), "{line}: {words:?}");
    }
    for (line, action) in [
        (&[][..], AgentCommand::Run),
        (&["install"], AgentCommand::Run),
        (&["uninstall"], AgentCommand::Uninstall),
        (&["cleanup"], AgentCommand::Uninstall),
    ] {
        assert_eq!(AgentCommand::of(&words(line)), action, "{line:?}");
    }
    assert!(command_line().read(["uninstall".into(), "--once".into()]).is_err());
}

/// A template replaces the settings of the built-in entry.
#[test]
fn every_key_of_the_entry_that_a_template_replaces_is_found() {
    let keys = [
        "EXCLUDE_NAMESPACES",
        "NATIVE_NFTABLES",
        "NFT_SETS",
        "STRICT_CAPTURE",
        "ACCEPTED_RULES",
        "ACCEPT_RULES_OF_PODS",
        "SANDBOXED_RUNTIMES",
        "SANDBOXED_PODS",
    ];
    let value = |name: &str| match name {
        "SANDBOXED_PODS" => "skip",
        "ACCEPTED_RULES" => "comment=ours",
        "ACCEPT_RULES_OF_PODS" => "false",
        _ => "true",
    };
    let mut env = keys.map(|name| (name, value(name))).to_vec();
    assert_eq!(notices(&[], &env), [""; 0]);
    env.push(("CNI_NETWORK_CONFIG", r#"{"type":"istio-cni"}"#));
    let found = notices(&[], &env);
    for name in keys {
        let wanted = format!("{name} has no effect: the template in CNI_NETWORK_CONFIG replaces it");
        assert!(found.contains(&wanted), "{wanted}: {found:#?}");
    }
    assert_eq!(found.len(), keys.len(), "{found:#?}");
    let off = keys[..4].iter().map(|name| (*name, "false")).collect::<Vec<_>>();
    assert_eq!(notices(&["--cni-network-config={\"type\":\"istio-cni\"}"], &off[1..]), [""; 0]);
    let [sets] = &notices(&[], &[("NFT_SETS", "true")])[..] else { panic!("one notice") };
    assert!(sets.starts_with("NFT_SETS has no effect: only native nftables rules have sets"), "{sets}");
}

#[test]
fn unused_settings_are_no_flags() {
    let mut unused = SETTINGS.iter().filter(|setting| matches!(setting.status, Status::WithoutEffect(_)));
    assert!(unused.all(|setting| setting.flag.is_none()));
}

#[test]
fn an_action_that_another_one_wins_over_is_said_to_have_no_effect() {
    let both = [("REPAIR_DELETE_PODS", "true"), ("REPAIR_LABEL_PODS", "true")];
    assert_eq!(notices(&[], &both), ["REPAIR_LABEL_PODS has no effect: REPAIR_DELETE_PODS wins"]);
    let all = [both[0], both[1], ("REPAIR_REPAIR_PODS", "true")];
    let texts = notices(&[], &all);
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts.iter().all(|text| text.ends_with("REPAIR_REPAIR_PODS wins")), "{texts:?}");
    let alone = notices(&[], &[("MOUNTED_PROC_DIR", "/p"), ("MOUNTED_CNI_NETNS_DIR", "/n")]);
    assert_eq!(alone.len(), 2, "{alone:?}");
    for user in ["REPAIR_REPAIR_PODS", "AMBIENT_ENABLED"] {
        let used = [("MOUNTED_PROC_DIR", "/p"), ("MOUNTED_CNI_NETNS_DIR", "/n"), (user, "true")];
        assert_eq!(notices(&[], &used), [""; 0], "{user}");
    }
    for (install, count) in [("inline", 1), ("auto", 0), ("drop-in", 0)] {
        let texts = notices(&[], &[("MOUNTED_PROC_DIR", "/p"), ("CNI_INSTALL", install)]);
        assert_eq!(texts.len(), count, "{install}: {texts:?}");
    }
}

#[test]
fn settings_of_a_repair_that_is_not_made_are_said_to_have_no_effect() {
    let selecting = [
        ("REPAIR_SIDECAR_ANNOTATION", "x"),
        ("REPAIR_INIT_CONTAINER_NAME", "x"),
        ("REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE", "x"),
        ("REPAIR_INIT_CONTAINER_EXIT_CODE", "1"),
        ("REPAIR_LABEL_SELECTORS", "x"),
        ("REPAIR_FIELD_SELECTORS", "metadata.name=x"),
    ];
    let labelling = [("REPAIR_BROKEN_POD_LABEL_KEY", "x"), ("REPAIR_BROKEN_POD_LABEL_VALUE", "x")];
    let texts = notices(&[], &[&selecting[..], &labelling].concat());
    assert_eq!(texts.len(), 8, "{texts:?}");
    for (name, because) in selecting
        .map(|(name, _)| (name, "repair is off"))
        .into_iter()
        .chain(labelling.map(|(name, _)| (name, "broken pods are not labelled")))
    {
        assert!(texts.contains(&format!("{name} has no effect: {because}")), "{name} {texts:?}");
    }
    let deletes = [&selecting[..], &labelling, &[("REPAIR_DELETE_PODS", "true")]].concat();
    assert_eq!(notices(&[], &deletes).len(), 2, "the label's alone");
    let labels = [&selecting[..], &labelling, &[("REPAIR_LABEL_PODS", "true")]].concat();
    assert_eq!(notices(&[], &labels), [""; 0]);
    for action in ["REPAIR_REPAIR_PODS", "REPAIR_DELETE_PODS", "REPAIR_LABEL_PODS"] {
        let texts = notices(&[], &[("REPAIR_ENABLED", "false"), (action, "true")]);
        assert_eq!(texts, [format!("{action} has no effect: REPAIR_ENABLED is false")]);
    }
    // What charts write in any case, and what is the default.
    let usual = [
        ("REPAIR_SIDECAR_ANNOTATION", "sidecar.istio.io/status"),
        ("REPAIR_INIT_CONTAINER_NAME", "istio-validation"),
        ("REPAIR_INIT_CONTAINER_EXIT_CODE", "126"),
        ("REPAIR_BROKEN_POD_LABEL_KEY", "cni.istio.io/uninitialized"),
        ("REPAIR_BROKEN_POD_LABEL_VALUE", "true"),
        ("REPAIR_NODE_NAME", "n"),
    ];
    assert_eq!(notices(&[], &usual), [""; 0]);
}

#[test]
fn selectors_and_labels_that_are_none_are_refused_together() {
    let wrong = [
        ("REPAIR_LABEL_SELECTORS", "app in web"),
        ("REPAIR_FIELD_SELECTORS", "spec.colour=red"),
        ("REPAIR_LABEL_PODS", "true"),
        ("REPAIR_BROKEN_POD_LABEL_KEY", "-x"),
        ("REPAIR_BROKEN_POD_LABEL_VALUE", "a b"),
    ];
    let problems = read(&[], &wrong).expect_err("all wrong");
    assert_eq!(problems.len(), 4, "{problems:?}");
    let settings =
        read(&[], &[("REPAIR_BROKEN_POD_LABEL_KEY", "-x"), ("NODE_NAME", "n")]).expect("labels are off");
    assert_eq!(settings.0.repair.filter.node, "n", "where REPAIR_NODE_NAME is not given");
}

#[test]
fn a_nodes_taint_is_unmanaged_by_default() {
    let usual = settings(&[], &[]).taint;
    assert!(!usual.keeps_taint && !usual.keeps_condition && usual.probe);
    assert_eq!(usual.marking.taint.to_string(), "cni.istio.io/not-ready:NoSchedule");
    assert_eq!(
        (usual.marking.after, usual.marking.condition_type.as_str()),
        (Duration::from_secs(30), "cni.istio.io/Ready")
    );
    let taint = settings(&[], &[("NODE_TAINT", "true")]).taint;
    assert!(taint.keeps_taint && taint.keeps_condition);
    let condition = settings(&[], &[("NODE_CONDITION", "true")]).taint;
    assert!(!condition.keeps_taint && condition.keeps_condition);
}

#[test]
fn the_names_of_istios_releases_are_understood() {
    let env = [
        ("NODE_TAINT", "true"),
        ("PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME", "example.com/no"),
        ("TAINT_CONFIGMAP-NAME", "selectors"),
        ("TAINT_CONFIGMAP-NAMESPACE", "istio-system"),
        ("TAINT_RUN-AS-DAEMON", "true"),
        ("TAINT_OLD_KEYS", "NodeReadiness"),
    ];
    let (settings, notices) = read(&["taint-controller"], &env).expect("settings");
    let taint = settings.taint;
    assert_eq!(
        (taint.marking.taint.key.as_str(), taint.marking.old_keys.as_slice()),
        ("example.com/no", &["NodeReadiness".to_owned()][..])
    );
    assert_eq!(taint.config_map, ("istio-system".to_owned(), "selectors".to_owned()));
    let says = |part: &str| notices.iter().any(|notice| notice.contains(part));
    assert!(
        says("is understood as TAINT_KEY") && says("is understood as TAINT_CONFIGMAP_NAME"),
        "{notices:?}"
    );
    assert!(says("TAINT_RUN-AS-DAEMON") && says("NODE_TAINT has no effect"), "{notices:?}");
}

#[test]
fn a_taint_that_no_node_can_have_is_refused_and_one_that_is_not_used_is_found() {
    let wrong = [
        ("TAINT_KEY", "not a key"),
        ("TAINT_VALUE", "a value"),
        ("TAINT_EFFECT", "Sometimes"),
        ("TAINT_OLD_KEYS", "fine,/"),
        ("NODE_CONDITION_TYPE", "a b"),
        ("TAINT_AFTER", "soon"),
    ];
    let problems = read(&[], &wrong).expect_err("problems");
    assert_eq!(problems.len(), wrong.len(), "{problems:?}");
    let found = notices(
        &[],
        &[("TAINT_KEY", "example.com/no"), ("TAINT_PROBE", "true"), ("TAINT_CONFIGMAP_NAME", "x")],
    );
    assert_eq!(found.iter().filter(|notice| notice.contains("has no effect")).count(), 3, "{found:?}");
    assert!(notices(&[], &[("TAINT_KEYS", "x")])[0].contains("TAINT_KEY"));
}
