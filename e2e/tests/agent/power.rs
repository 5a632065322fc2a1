//! Power failures, deaths and faults at every step of installing, refreshing and removing.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use crate::model::{Fault, Model};
use e2e::net_dirs::plugins_run;
use install_cni::conflist::{NetConf, PLUGIN_TYPE};
use install_cni::install::conflist_edits::{EntryObstacle, ORIGINAL};
use install_cni::install::disk::{Disk, Lock, PREPARED, PendingFile, Stat, TEMPORARY};
use install_cni::install::installer::Installer;
use install_cni::install::leave;
use install_cni::install::once;
use install_cni::install::plugin::{Ask, PluginQuestion, PluginRefusal};
use install_cni::settings::Settings;

const NET: &str = "/host/etc/cni/net.d";
const BIN: &str = "/host/opt/cni/bin";
const RUN: &str = "/var/run/istio-cni";
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const CALICO: &str = "{\n  \"name\": \"net\",\n  \"plugins\": [\n    {\"type\": \"calico\"}\n  ]\n}\n";
const SINGLE: &str = "{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"single\",\n  \"type\": \"ptp\"\n}\n";

/// A plugin that is copied in two steps.
fn new_plugin() -> Vec<u8> {
    b"new plugin ".repeat(6_500)
}

/// A node with a network plugin, and an image with the plugin.
fn node(conf: (&str, &str)) -> Model {
    let model = Model::default();
    for folder in [NET, BIN, RUN, ACCOUNT, "/opt/cni/bin"] {
        model.folder(folder);
    }
    model.put(&format!("{NET}/{}", conf.0), conf.1.as_bytes(), 0o644);
    model.put("/opt/cni/bin/istio-cni", &new_plugin(), 0o755);
    model.put(&format!("{ACCOUNT}/token"), b"token-1\n", 0o600);
    model.put(&format!("{ACCOUNT}/ca.crt"), b"authority\n", 0o600);
    model
}

fn settings(env: &[(&str, &str)]) -> Settings {
    let given = settings_cli::ParsedArgs::default();
    let required = [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")];
    let env: Vec<_> =
        required.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Settings::read(&given, &env).expect("settings").0
}

/// A plugin is a file of the model that says it is one.
struct InModel(Arc<Model>);

impl Ask for InModel {
    fn ask(&self, path: &Path, _: PluginQuestion<'_>) -> Result<(), PluginRefusal> {
        let content = self.0.content(&path.to_string_lossy()).map(|(content, _)| content);
        let is_plugin = content.is_some_and(|content| content.windows(6).any(|word| word == b"plugin"));
        let refusal = || PluginRefusal::NoPlugin { path: path.to_owned(), why: "no plugin".into() };
        is_plugin.then_some(()).ok_or_else(refusal)
    }
}

fn installer(model: &Arc<Model>, env: &[(&str, &str)]) -> Installer {
    Installer::new(model.clone(), Arc::new(InModel(model.clone())), settings(env))
}

/// A start of the agent, without faults: until nothing changes any more.
fn start(model: Model, env: &[(&str, &str)]) -> Model {
    let model = Arc::new(model);
    let installer = installer(&model, env);
    installer.sweep().expect("sweeps");
    for _ in 0..4 {
        let pass = installer.pass(None).expect("installs");
        if pass.edits.is_empty() && pass.obstacle.as_ref().is_none_or(EntryObstacle::is_open) {
            installer.check().expect("ready");
            drop(installer);
            return Arc::try_unwrap(model).unwrap_or_else(|_| panic!("still used"));
        }
    }
    panic!("never settles")
}

/// What must hold whenever a runtime may look.
fn assert_sound(model: &Model, when: &str) {
    let plugin = model.content(&format!("{BIN}/{PLUGIN_TYPE}"));
    let source = model.content("/opt/cni/bin/istio-cni").expect("the image").0;
    let old = b"old plugin".to_vec();
    if let Some((content, mode)) = &plugin {
        assert!(*content == source || *content == old, "{when}: half a binary");
        assert_eq!(mode & 0o755, 0o755, "{when}: a binary that cannot be executed");
    }
    let kubeconfig = model.content(&format!("{RUN}/istio-cni-kubeconfig"));
    if let Some((content, mode)) = &kubeconfig {
        let text = String::from_utf8_lossy(content);
        assert!(
            text.starts_with("apiVersion: v1\n") && text.ends_with("\"\n"),
            "{when}: half a kubeconfig: {text}"
        );
        assert_eq!(*mode, 0o600, "{when}");
    }
    let mut networks = 0;
    for name in model.names(NET) {
        let is_loaded = [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end));
        let (content, _) = model.content(&format!("{NET}/{name}")).expect("is there");
        let text = String::from_utf8(content).expect("text");
        if is_loaded {
            let conf = NetConf::parse(&name, &text)
                .unwrap_or_else(|error| panic!("{when}: {name}: {error}: {text:?}"));
            networks += 1;
            if conf.network.has_ours() {
                assert!(plugin.is_some(), "{when}: an entry without its binary");
                assert!(kubeconfig.is_some(), "{when}: an entry without its kubeconfig");
            }
        } else if name.ends_with(ORIGINAL) {
            assert!(text == CALICO || text == SINGLE, "{when}: half an original: {text:?}");
        } else if install_cni::install::conflist_edits::matters(&name) {
            assert!(text.ends_with(".\n"), "{when}: half a mark: {text:?}");
        }
    }
    assert!(networks > 0, "{when}: no network is left");
}

/// Numbers that look random and are the same every time.
fn chances(seed: usize) -> impl FnMut(usize) -> usize {
    let mut state = seed as u64 * 2 + 1;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap_or(0) % below
    }
}

/// A network configuration, and the agent's environment.
type Case = ((&'static str, &'static str), &'static [(&'static str, &'static str)]);

const CASES: [Case; 8] = [
    (("10-calico.conflist", CALICO), &[]),
    (("10-single.conf", SINGLE), &[]),
    (("10-single.json", SINGLE), &[("KUBECONFIG_TOKEN_FILE", "true")]),
    (("10-calico.conflist", CALICO), &[("ISTIO_OWNED_CNI_CONFIG", "true")]),
    (
        ("10-calico.conflist", CALICO),
        &[("ISTIO_OWNED_CNI_CONFIG", "true"), ("ISTIO_OWNED_CNI_CONFIG_FILENAME", "00-mesh.conflist")],
    ),
    (("10-calico.conflist", CALICO), &[("CHAINED_CNI_PLUGIN", "false"), ("READY_BEFORE_CALLED", "true")]),
    (("10-calico.conflist", CALICO), &[("CNI_INSTALL", "auto")]),
    (("10-calico.conflist", CALICO), &[("CNI_INSTALL", "drop-in"), ("READY_BEFORE_CALLED", "true")]),
];

/// Plays `work` on a copy of `before`, cut short at every operation, by death and by power failure, and checks what is left: once, where it is the same
/// after several. Returns the number of moments.
fn cut_short_everywhere(
    before: &Model,
    env: &[(&str, &str)],
    goal: &Model,
    work: &dyn Fn(&Installer),
) -> usize {
    let whole = Arc::new(before.copy());
    whole.break_at(None);
    work(&installer(&whole, env));
    let operations = whole.operations();
    let goal = goal.everything();
    let (mut moments, mut checked) = (0, BTreeSet::new());
    let mut check = |model: Model, when: &str| {
        moments += 1;
        if checked.insert(model.seen()) {
            assert_sound(&model, when);
            assert_eq!(start(model, env).everything(), goal, "{when}");
        }
    };
    for at in 0..=operations {
        let model = Arc::new(before.copy());
        model.break_at(Some(Fault::Death { at }));
        work(&installer(&model, env));
        check(model.copy(), &format!("killed at {at}"));
        for seed in 0..8 {
            let after = model.after_power_failure(chances(at * 100 + seed));
            check(after, &format!("power lost at {at}, {seed}"));
        }
    }
    moments
}

fn install(installer: &Installer) {
    // What fails is what the test wants to see.
    let _ = installer.pass(None);
}

#[test]
fn installing_may_be_cut_short_at_any_moment() {
    let mut moments = 0;
    for (conf, env) in CASES {
        let before = node(conf);
        let goal = start(before.copy(), env);
        moments += cut_short_everywhere(&before, env, &goal, &install);
    }
    assert!(moments >= 200, "only {moments} moments");
}

#[test]
fn a_single_install_may_be_cut_short_at_any_moment() {
    let mut moments = 0;
    for (conf, env) in CASES {
        let before = node(conf);
        let goal = start(before.copy(), env);
        moments +=
            cut_short_everywhere(&before, env, &goal, &|installer| drop(once::install_alone(installer)));
        // And a second one ends what the first began, and finds nothing more to do.
        let model = Arc::new(before.copy());
        model.break_at(Some(Fault::Death { at: model.operations() + 5 }));
        assert!(once::install_alone(&installer(&model, env)).is_err());
        model.break_at(None);
        let installer = installer(&model, env);
        assert!(once::install_alone(&installer).is_ok_and(|done| done.changed.has_changed()));
        assert!(once::install_alone(&installer).is_ok_and(|done| !done.changed.has_changed()));
        assert_eq!(model.everything(), goal.everything());
    }
    assert!(moments >= 200, "only {moments} moments");
}

#[test]
fn an_upgrade_may_be_cut_short_at_any_moment() {
    for (conf, env) in CASES {
        let old = node(conf);
        old.put("/opt/cni/bin/istio-cni", b"old plugin", 0o755);
        let before = start(old, env);
        before.put("/opt/cni/bin/istio-cni", &new_plugin(), 0o755);
        before.put(&format!("{ACCOUNT}/token"), b"token-2\n", 0o600);
        let env = &[env, &[("EXCLUDE_NAMESPACES", "kube-system")]].concat();
        let goal = start(before.copy(), env);
        cut_short_everywhere(&before, env, &goal, &install);
    }
}

#[test]
fn removal_may_be_cut_short_at_any_moment() {
    for (conf, env) in CASES {
        let clean = node(conf);
        let before = start(clean.copy(), env);
        let goal = start(clean.copy(), env);
        cut_short_everywhere(&before, env, &goal, &|installer| drop(leave::remove(installer)));
        // And a second removal ends what the first began.
        let operations = {
            let model = Arc::new(before.copy());
            model.break_at(None);
            leave::remove(&installer(&model, env)).expect("removes");
            assert_eq!(model.everything(), clean.everything());
            model.operations()
        };
        for at in 0..operations {
            let model = Arc::new(before.copy());
            model.break_at(Some(Fault::Death { at }));
            let _ = leave::remove(&installer(&model, env));
            let model = Arc::new(model.after_power_failure(chances(at)));
            leave::remove(&installer(&model, env)).unwrap_or_else(|errors| panic!("at {at}: {errors:?}"));
            assert_eq!(model.everything(), clean.everything(), "removal cut short at {at}");
        }
    }
}

/// What a run left renamed and not synced looks like what it should be, and is lost with the power all the same.
#[test]
fn what_is_done_once_outlasts_a_power_failure_whatever_came_before() {
    for (conf, env) in CASES {
        let clean = node(conf);
        let goal = start(clean.copy(), env);
        let lasts = |model: &Model, goal: &Model, when: &str| {
            for seed in 0..8 {
                let mut after = model.after_power_failure(chances(seed)).everything();
                // What is half-written no runtime loads, and the next agent removes.
                after.retain(|path, _| !path.ends_with(TEMPORARY) && !path.contains(PREPARED));
                assert_eq!(after, goal.everything(), "{when}, {seed}");
            }
        };
        let operations = |before: &Model, work: &dyn Fn(&Installer)| {
            let model = Arc::new(before.copy());
            model.break_at(None);
            work(&installer(&model, env));
            model.operations()
        };
        for at in 0..=operations(&clean, &install) {
            // Another agent goes on where this one was killed.
            let model = Arc::new(clean.copy());
            model.break_at(Some(Fault::Death { at }));
            install(&installer(&model, env));
            model.break_at(None);
            lasts(&start(model.copy(), env), &goal, &format!("killed at {at}"));
            // The same agent tries again.
            let agent = installer(&model, env);
            for errno in [5, 28] {
                model.break_at(Some(Fault::Error { at, errno }));
                install(&agent);
            }
            model.break_at(None);
            (0..4).for_each(|_| install(&agent));
            lasts(&model, &goal, &format!("failed at {at}"));
        }
        let remove = |installer: &Installer| drop(leave::remove(installer));
        for at in 0..=operations(&goal, &remove) {
            let model = Arc::new(goal.copy());
            model.break_at(Some(Fault::Death { at }));
            remove(&installer(&model, env));
            model.break_at(None);
            leave::remove(&installer(&model, env)).unwrap_or_else(|errors| panic!("at {at}: {errors:?}"));
            lasts(&model, &clean, &format!("removal killed at {at}"));
        }
    }
}

#[test]
fn full_disks_read_only_disks_and_forbidden_files_do_no_harm() {
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    const EACCES: i32 = 13;
    const EIO: i32 = 5;
    for (conf, env) in CASES {
        let before = node(conf);
        let goal = start(before.copy(), env);
        for errno in [ENOSPC, EROFS, EACCES, EIO] {
            for at in 0..200 {
                let model = Arc::new(before.copy());
                model.break_at(Some(Fault::Error { at, errno }));
                let done = installer(&model, env).pass(None);
                let has_failed = model.operations() > at;
                assert_eq!(done.is_err(), has_failed, "{errno} at {at}: {done:?}");
                model.break_at(None);
                assert_sound(&model, &format!("error {errno} at {at}"));
                assert_eq!(start(model.copy(), env).everything(), goal.everything(), "error {errno} at {at}");
                if !has_failed {
                    break;
                }
            }
        }
    }
}

const READER: &str = "/host/proc/4242";

/// A node whose runtime reads folders of lists, and was seen to do so.
fn node_with_reader() -> Model {
    let model = node(("10-calico.conflist", CALICO));
    model.folder("/host/proc");
    model.folder(READER);
    let stat = format!("4242 (containerd) {}\n", ["7"; 50].join(" "));
    model.put(&format!("{READER}/stat"), stat.as_bytes(), 0o444);
    model.put(&format!("{RUN}/drop-in-reader"), b"4242 7\n", 0o600);
    model
}

/// The plugins that a runtime runs, in their order: with libcni 1.3 also those of the list's folder.
fn run_by_runtime(model: &Model, reads_folders: bool) -> Vec<String> {
    let inside = model.list(Path::new(&format!("{NET}/net"))).unwrap_or_default();
    let inside = inside.iter().filter_map(|name| name.to_str()).filter(|name| name.ends_with(".conf"));
    let beside: Vec<String> =
        inside.filter(|_| reads_folders).map(|name| text(model, &format!("net/{name}"))).collect();
    plugins_run(&text(model, "10-calico.conflist"), beside.iter().map(String::as_str))
}

/// In each direction, and away: whenever the agent is killed or the power is lost, the runtime that is there runs the plugin, and loads the list.
#[test]
fn between_the_list_and_beside_it_the_plugin_is_always_in_one_place() {
    const AUTO: &[(&str, &str)] = &[("CNI_INSTALL", "auto")];
    const INLINE: &[(&str, &str)] = &[("CNI_INSTALL", "inline")];
    let end_runtime = |model: &Model| {
        model.remove(Path::new(&format!("{READER}/stat"))).expect("ends");
        model.sync_directory(Path::new(READER)).expect("for good");
    };
    let inlined = start(node_with_reader(), INLINE);
    let beside = start(node_with_reader(), AUTO);
    assert_eq!(
        (text(&beside, "10-calico.conflist").as_str(), run_by_runtime(&beside, true)),
        (CALICO, vec!["calico".to_owned(), "istio-cni".to_owned()])
    );
    let ended = beside.copy();
    end_runtime(&ended);
    let mut moments = 0;
    for (before, env, reads_folders) in [
        (&inlined, AUTO, true),
        (&beside, INLINE, true),
        // A runtime that has ended is followed by one that may read the list alone. Until the agent has taken notice, none is there.
        (&ended, AUTO, true),
        (&start(ended.copy(), AUTO), INLINE, false),
    ] {
        let goal = start(before.copy(), env);
        moments += cut_short_everywhere(before, env, &goal, &|installer| {
            install(installer);
        });
        let whole = before.copy();
        whole.break_at(None);
        let whole = Arc::new(whole);
        install(&installer(&whole, env));
        for at in 0..=whole.operations() {
            let model = Arc::new(before.copy());
            model.break_at(Some(Fault::Death { at }));
            install(&installer(&model, env));
            let after = (0..8).map(|seed| model.after_power_failure(chances(at * 100 + seed)));
            for model in after.chain([model.copy()]) {
                let run = run_by_runtime(&model, reads_folders);
                assert!(run.iter().any(|kind| kind == PLUGIN_TYPE), "{env:?}, killed at {at}: {run:?}");
            }
        }
    }
    assert!(moments >= 200, "only {moments} moments");
}

/// With the entry beside the list, removal leaves the list as it is: the same bytes in the same file.
#[test]
fn removal_from_beside_a_list_does_not_touch_it() {
    let list = Path::new("/host/etc/cni/net.d/10-calico.conflist");
    let mut clean = node_with_reader();
    clean = clean.copy();
    let before = start(clean.copy(), &[("CNI_INSTALL", "auto")]);
    let known = before.stat(list).expect("is there");
    let model = Arc::new(before);
    leave::remove(&installer(&model, &[("CNI_INSTALL", "auto")])).expect("removes");
    assert_eq!(model.stat(list).expect("is there"), known);
    clean.remove(Path::new(&format!("{RUN}/drop-in-reader"))).expect("removes");
    assert_eq!(model.everything(), clean.everything());
}

#[test]
fn a_removal_that_fails_keeps_what_the_entry_needs() {
    let before = start(node(("10-calico.conflist", CALICO)), &[]);
    let mut kept = 0;
    for at in 0..40 {
        let model = Arc::new(before.copy());
        model.break_at(Some(Fault::Error { at, errno: 30 }));
        let done = leave::remove(&installer(&model, &[]));
        model.break_at(None);
        assert_sound(&model, &format!("removal failed at {at}"));
        let has_entry = NetConf::parse("x.conflist", &text(&model, "10-calico.conflist"))
            .expect("valid")
            .network
            .has_ours();
        if has_entry {
            let errors = done.expect_err("the entry is still there");
            assert!(errors.iter().any(|error| matches!(error, leave::RemovalError::Kept)), "{errors:?}");
            kept += 1;
        }
    }
    assert!(kept > 2, "the case never came up");
}

#[test]
fn short_writes_are_written_to_the_end() {
    for (conf, env) in CASES {
        let model = node(conf);
        let goal = start(model.copy(), env);
        model.break_at(Some(Fault::ShortWrites));
        assert_eq!(start(model, env).everything(), goal.everything());
    }
}

#[test]
fn the_model_loses_what_is_not_synced() {
    use install_cni::install::disk::Disk;
    let model = Model::default();
    model.folder("/a");
    model.put("/a/file", b"old", 0o600);
    let path = std::path::Path::new("/a/new");
    model.create(path, 0o600).expect("creates").write_all(b"new").expect("writes");
    model.rename(path, std::path::Path::new("/a/file")).expect("renames");
    let mut ends: Vec<Vec<u8>> = (0..200)
        .map(|seed| model.after_power_failure(chances(seed)).content("/a/file").expect("a file").0)
        .collect();
    ends.sort();
    ends.dedup();
    // The old file, and every part of the new one.
    assert_eq!(ends, [b"".to_vec(), b"n".to_vec(), b"ne".to_vec(), b"new".to_vec(), b"old".to_vec()]);
}

fn text(model: &Model, name: &str) -> String {
    String::from_utf8(model.content(&format!("{NET}/{name}")).expect("is there").0).expect("text")
}

/// A disk on which another program writes the plugin's binary each time it has been read.
struct Meddled(Arc<Model>);

impl Disk for Meddled {
    fn list(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        self.0.list(directory)
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        self.0.stat(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + '_>> {
        let mut content = Vec::new();
        self.0.open(path)?.read_to_end(&mut content)?;
        if path.starts_with(BIN) {
            self.0.put(&path.to_string_lossy(), &b"old! plugin ".repeat(6_500), 0o755);
        }
        Ok(Box::new(io::Cursor::new(content)))
    }

    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn PendingFile + '_>> {
        self.0.create(path, mode)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }

    fn lock(&self, directories: &[&Path]) -> io::Result<Lock> {
        self.0.lock(directories)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.0.sync_directory(directory)
    }
}

#[test]
fn a_binary_changed_behind_the_comparison_is_not_taken_for_ours() {
    let model = Arc::new(node(("10-calico.conflist", CALICO)));
    model.put(&format!("{BIN}/istio-cni"), &new_plugin(), 0o755);
    let meddled =
        Installer::new(Arc::new(Meddled(model.clone())), Arc::new(InModel(model.clone())), settings(&[]));
    for _ in 0..2 {
        meddled.pass(None).expect("installs");
        assert!(meddled.check().is_err(), "ready with another program's binary");
    }
    let left_alone = installer(&model, &[]);
    assert_eq!(left_alone.pass(None).expect("installs").binaries, ["istio-cni"]);
    left_alone.check().expect("ready");
}

/// A disk on which the network plugin rewrites its file while the agent is making a list of the old one.
struct Rewritten(Arc<Model>);

const NEWER: &str = "{\"cniVersion\":\"0.4.0\",\"name\":\"single\",\"type\":\"macvlan\"}\n";

impl Disk for Rewritten {
    fn list(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        self.0.list(directory)
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        self.0.stat(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + '_>> {
        self.0.open(path)
    }

    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn PendingFile + '_>> {
        self.0.create(path, mode)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)?;
        if to.ends_with("10-single.conflist") {
            self.0.put(&format!("{NET}/10-single.conf"), NEWER.as_bytes(), 0o644);
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }

    fn lock(&self, directories: &[&Path]) -> io::Result<Lock> {
        self.0.lock(directories)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.0.sync_directory(directory)
    }
}

#[test]
fn what_its_owner_wrote_a_moment_ago_is_not_deleted() {
    let model = Arc::new(node(("10-single.conf", SINGLE)));
    let meddled =
        Installer::new(Arc::new(Rewritten(model.clone())), Arc::new(InModel(model.clone())), settings(&[]));
    let error = meddled.pass(None).expect_err("another program wrote at the same moment");
    assert!(error.is_collision(), "{error}");
    assert_eq!(text(&model, "10-single.conf"), NEWER);
    let after = start(model.copy(), &[]);
    assert!(text(&after, "10-single.conflist").contains("macvlan"));
}
