//! One pass over the node: binaries, then the kubeconfig, then the entry, each only where it differs.
//!
//! In this order a runtime never finds an entry whose binary or kubeconfig is missing, whenever the pass is cut short.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::{SCOPE, lock};
use cni_core::conf::{Conf, Envelope};
use cni_core::net_dir::{self, is_loaded};
use cni_core::wire::CniCommand;
use reasons::AgentReason;

use crate::conflist::{EntryError, NetConf, PLUGIN_TYPE, PluginEntry};
use crate::install::conflist_edits::{
    self, Directory, DropIn, Edit, EntryObstacle, FOLDER_FILE, File, MARK, Plan, Want,
};
use crate::install::disk::{self, Disk, DiskError, FileAttributes, Lock, Stat, context};
use crate::install::drop_in_reader::{self, DropInReader};
use crate::install::kubeconfig::PluginCredentials;
use crate::install::plugin::{Ask, PluginQuestion};
use crate::install::plugin_token::PluginToken;
use crate::install::ready::Reason;
use crate::install::seen_calls::{self, SeenCalls};
use crate::settings::{
    EntrySettings, InstallMode, KUBECONFIG, OWNED_FILE, Paths, STANDALONE_FILE, Settings, TemplateSource,
};

/// How long a yes of the plugin holds where nothing that the agent knows of has changed.
const ANSWER_HOLDS: Duration = Duration::from_secs(30);
/// The kubeconfig of Istio's agents up to 1.22, in the configuration directory.
const OLDER_KUBECONFIG: &str = "ZZZ-istio-cni-kubeconfig";

/// Puts the plugin on the node.
pub struct Installer {
    disk: Arc<dyn Disk>,
    plugin: Arc<dyn Ask>,
    pub(crate) settings: Settings,
    /// The plugin's entry, which may change while the agent runs.
    entry: Mutex<EntrySettings>,
    token: Arc<PluginToken>,
    /// Binaries whose content was compared, by target: what source and target were then. Never held during disk operations, so that
    /// readiness is answered in time.
    compared: Mutex<BTreeMap<PathBuf, (Stat, Stat)>>,
    /// What the installed plugin was asked last and answered with yes.
    asked: Mutex<Option<Asked>>,
    /// When a runtime called the plugin; receives calls.
    pub calls: Arc<SeenCalls>,
    /// Which process reads the entry beside the list; receives calls by that.
    pub reader: Arc<DropInReader>,
    /// Whether the runtime may not have read our files in folders of lists, whose changes it does not see.
    owes_nudge: AtomicBool,
    /// Whether the names in the node's directories are known to outlast a power failure.
    is_durable: AtomicBool,
}

/// A question that the plugin answered with yes.
struct Asked {
    at: Instant,
    conf: String,
    /// The plugin and the files it reads.
    files: Vec<Option<Stat>>,
}

/// What a pass did and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pass {
    /// The binaries that were copied.
    pub binaries: Vec<String>,
    /// Whether the kubeconfig was written.
    pub kubeconfig: bool,
    /// The changes of the configuration directory that were made.
    pub edits: Vec<Edit>,
    /// What was wrong with the configuration directory before.
    pub obstacle: Option<EntryObstacle>,
    /// The file that has our entry.
    pub target: Option<String>,
    /// The list that the entry is chained into or beside.
    pub list: Option<String>,
    /// Why the entry is in the list where the settings would rather have it beside the list.
    pub inlined_because: Option<String>,
    /// The plugins of that file, which hint at its other writers.
    pub neighbours: Vec<String>,
    /// Files in front of it that the runtime cannot load.
    pub invalid: Vec<(String, String)>,
    /// Whether the folder of a list could not be read.
    pub has_unread_folder: bool,
}

impl Pass {
    /// Whether it changed anything.
    #[must_use]
    pub const fn has_changed(&self) -> bool {
        !self.binaries.is_empty() || self.kubeconfig || !self.edits.is_empty()
    }
}

/// What a pass failed at.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// Having the node's directories for itself, and on disk as they are seen.
    #[error("cannot begin: {0}")]
    Begin(#[source] DiskError),
    /// Copying binaries.
    #[error("cannot install the plugin: {0}")]
    Binaries(#[source] DiskError),
    /// Writing the kubeconfig.
    #[error("cannot write the plugin's kubeconfig: {0}")]
    Kubeconfig(#[source] DiskError),
    /// Editing network configurations.
    #[error("cannot edit the network configuration: {0}")]
    Conflist(#[source] DiskError),
    /// Reading the template.
    #[error("the template of the istio-cni entry is wrong: {0}")]
    Template(#[source] EntryError),
    /// The plugin would reject its entry.
    #[error("{file} not written: the plugin would reject its entry: {why}")]
    Refused {
        /// Where the entry was to go.
        file: String,
        /// The plugin's error.
        why: String,
    },
}

impl InstallError {
    /// The failure in metrics.
    #[must_use]
    pub const fn reason(&self) -> AgentReason {
        match self {
            Self::Begin(_) | Self::Binaries(_) => AgentReason::CopyBinariesFailure,
            Self::Kubeconfig(_) => AgentReason::CreateKubeconfigFailure,
            Self::Conflist(_) | Self::Template(_) | Self::Refused { .. } => {
                AgentReason::CreateCniConfigFailure
            }
        }
    }

    /// Whether the only problem is another program's concurrent write.
    #[must_use]
    pub fn is_collision(&self) -> bool {
        matches!(self, Self::Conflist(error) if error.error.kind() == io::ErrorKind::Interrupted)
    }
}

impl Installer {
    /// An installer for a node.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, plugin: Arc<dyn Ask>, settings: Settings) -> Self {
        let (token, entry) = (Arc::default(), Mutex::new(settings.entry.clone()));
        let calls = SeenCalls::new(disk.clone(), settings.paths.run.join(seen_calls::FILE_NAME));
        let Paths { proc, run, .. } = &settings.paths;
        let reader = DropInReader::new(disk.clone(), proc.clone(), run.join(drop_in_reader::FILE_NAME));
        Self {
            disk,
            plugin,
            settings,
            entry,
            token,
            compared: Mutex::default(),
            asked: Mutex::default(),
            calls: Arc::new(calls),
            reader: Arc::new(reader),
            // An earlier agent may have been killed in between.
            owes_nudge: AtomicBool::new(true),
            is_durable: AtomicBool::new(false),
        }
    }

    /// The same with tokens of the plugin's own.
    #[must_use]
    pub fn with_token(self, token: Arc<PluginToken>) -> Self {
        Self { token, ..self }
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Keeps other agents from the node's directories until it is dropped.
    ///
    /// # Errors
    /// When another agent keeps working on them.
    pub(crate) fn lock(&self) -> Result<Lock, DiskError> {
        let paths = &self.settings.paths;
        context(self.disk.lock(&[&paths.net, &paths.bin, &paths.run]), "lock", &paths.net)
    }

    /// Syncs the node's directories, unless that is known to be needless. A correct name may not be on disk yet: the process that wrote
    /// it may have been killed, or have failed, before the sync.
    ///
    /// # Errors
    /// When a directory cannot be synced.
    pub(crate) fn make_durable(&self) -> Result<(), DiskError> {
        if self.is_durable.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Paths { net, bin, run, .. } = &self.settings.paths;
        // Binaries and kubeconfig before the entry that needs them.
        for directory in [bin, run, net] {
            match self.disk.sync_directory(directory) {
                // Nothing is pending if the directory does not exist, is read-only, or its file system cannot sync.
                Err(error) if is_needless(error.kind()) => {}
                synced => context(synced, "sync", directory)?,
            }
        }
        self.is_durable.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// After a change that failed, the sync may be what failed.
    pub(crate) fn note_durability<T, E>(&self, changed: Result<T, E>) -> Result<T, E> {
        changed.inspect_err(|_| self.is_durable.store(false, Ordering::Relaxed))
    }

    /// The directory of the node that was removed while this container had it mounted: changes there have no effect.
    #[must_use]
    pub fn lost_directory(&self) -> Option<&Path> {
        let Paths { net, bin, run, .. } = &self.settings.paths;
        let is_lost = |path: &Path| self.disk.stat(path).is_ok_and(|stat| stat.links == 0);
        [net, bin, run].into_iter().map(PathBuf::as_path).find(|path| is_lost(path))
    }

    /// Removes temporary files of an agent that was killed: one of ours, or Istio's.
    ///
    /// # Errors
    /// When it cannot.
    pub fn sweep(&self) -> Result<usize, DiskError> {
        let _lock = self.lock()?;
        self.sweep_locked()
    }

    /// As [`sweep`](Self::sweep), under the lock.
    pub(crate) fn sweep_locked(&self) -> Result<usize, DiskError> {
        let paths = &self.settings.paths;
        let mut binaries = self.source_names().unwrap_or_default();
        binaries.push(PLUGIN_TYPE.to_owned());
        let is_binary = |name: &str| binaries.iter().any(|binary| binary == name);
        let is_kubeconfig = |name: &str| [KUBECONFIG, OLDER_KUBECONFIG].contains(&name);
        let is_configuration = |name: &str, half: &str| {
            is_kubeconfig(name)
                || [OWNED_FILE, STANDALONE_FILE].contains(&name)
                || self.is_with_entry(name, &paths.net.join(half))
        };
        let mut count = 0;
        for (directory, is_ours) in [
            (&paths.bin, &(|name: &str, _: &str| is_binary(name)) as &dyn Fn(&str, &str) -> bool),
            (&paths.run, &|name, _| is_kubeconfig(name)),
            (&paths.net, &is_configuration),
        ] {
            if self.disk.stat(directory).is_ok() {
                let is_leftover = |half: &str| {
                    half.ends_with(disk::TEMPORARY)
                        || of_istios_agent(half).is_some_and(|name| is_ours(name, half))
                };
                count += disk::sweep(self.disk(), directory, &is_leftover)?;
            }
        }
        // Folders of lists, which hold plugins.
        for folder in self.disk.list(&paths.net).unwrap_or_default().iter().map(|name| paths.net.join(name)) {
            if self.disk.stat(&folder).is_ok_and(|known| !known.is_file) && self.disk.list(&folder).is_ok() {
                count += self.sweep_folder(&folder)?;
            }
        }
        Ok(count)
    }

    /// Likewise, in one of these; the whole of it if the agent was preparing or removing it.
    fn sweep_folder(&self, folder: &Path) -> Result<usize, DiskError> {
        if folder.to_string_lossy().ends_with(disk::PREPARED) {
            disk::remove_directory(self.disk(), folder)?;
            return Ok(1);
        }
        if self.disk.list(folder).is_ok_and(|names| names == [MARK]) {
            disk::discard_directory(self.disk(), folder, MARK)?;
            return Ok(1);
        }
        disk::sweep(self.disk(), folder, &|half| half.ends_with(disk::TEMPORARY))
    }

    /// Whether a file would be a network configuration with our entry, if it had this name.
    fn is_with_entry(&self, name: &str, path: &Path) -> bool {
        let text = disk::read_text(self.disk(), path);
        text.is_ok_and(|text| NetConf::parse(name, &text).is_ok_and(|conf| conf.network.has_ours()))
    }

    /// Makes everything as it should be, but leaves the configuration directory as it is if the entry goes into the file `left`, which another
    /// program keeps changing.
    ///
    /// # Errors
    /// At the first step that fails; later steps depend on it.
    pub fn pass(&self, left: Option<&str>) -> Result<Pass, InstallError> {
        let _lock = self.lock().map_err(InstallError::Begin)?;
        self.make_durable().map_err(InstallError::Begin)?;
        self.note_durability(self.pass_locked(left))
    }

    fn pass_locked(&self, left: Option<&str>) -> Result<Pass, InstallError> {
        let mut pass = Pass::default();
        self.binaries(&mut pass).map_err(InstallError::Binaries)?;
        pass.kubeconfig = self.kubeconfig_locked().map_err(InstallError::Kubeconfig)?;
        let want = self.want()?;
        self.conflist(&want, left, &mut pass)?;
        Ok(pass)
    }

    fn binaries(&self, pass: &mut Pass) -> Result<(), DiskError> {
        for name in self.source_names()? {
            if self.binary(&name)? {
                pass.binaries.push(name);
            }
        }
        Ok(())
    }

    /// The names of the image's binaries.
    pub(crate) fn source_names(&self) -> Result<Vec<String>, DiskError> {
        let Paths { source_bin: source, bin, .. } = &self.settings.paths;
        let place = |path: &Path| self.disk.stat(path).ok().map(|stat| stat.inode);
        if let (Some(from), Some(to)) = (place(source), place(bin))
            && from == to
        {
            // Every plugin of the node would count as ours, and go with ours.
            let why = "SOURCE_CNI_BIN_DIR and MOUNTED_CNI_BIN_DIR are the same directory; keep the image's programs in one of their own";
            return context(Err(io::Error::new(io::ErrorKind::InvalidInput, why)), "install from", source);
        }
        let names = context(self.disk.list(source), "list", source)?;
        let mut names: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| self.disk.stat(&source.join(name)).is_ok_and(|stat| stat.is_file));
        names.sort_unstable();
        if !names.iter().any(|name| name == PLUGIN_TYPE) {
            let missing = io::Error::new(io::ErrorKind::NotFound, "the image lacks it");
            return context(Err(missing), "find", &source.join(PLUGIN_TYPE));
        }
        Ok(names)
    }

    /// Copies a binary if its content or mode differs; true if it did.
    fn binary(&self, name: &str) -> Result<bool, DiskError> {
        let (source, target) =
            (self.settings.paths.source_bin.join(name), self.settings.paths.bin.join(name));
        let from = context(self.disk.stat(&source), "find", &source)?;
        let mode = from.mode | 0o111;
        let mut replaced = false;
        loop {
            let there = self.disk.stat(&target).ok();
            let known = there.map(|there| (from, there));
            if known.is_some() && lock(&self.compared).get(&target) == known.as_ref() {
                return Ok(replaced);
            }
            let alike =
                there.is_some_and(|there| there.is_file && there.length == from.length && there.mode == mode);
            let mut content = context(self.disk.open(&source), "open", &source)?;
            if alike && context(disk::has_content(self.disk(), &target, &mut *content), "compare", &target)? {
                // As it was before it was compared: what became of it since is another file.
                lock(&self.compared).extend(known.map(|known| (target, known)));
                return Ok(replaced);
            }
            if replaced {
                // Another program writes it, too. Its owner is unknown, and its write wakes the next pass.
                return Ok(true);
            }
            let mut content = context(self.disk.open(&source), "open", &source)?;
            let works = |temporary: &Path| match name {
                PLUGIN_TYPE => self.plugin.ask(temporary, PluginQuestion::Version).map_err(io::Error::other),
                _ => Ok(()),
            };
            disk::replace_if(self.disk(), &target, &mut *content, FileAttributes::Mode(mode), &works)?;
            replaced = true;
        }
    }

    /// Writes the kubeconfig if it differs; true if it did.
    ///
    /// # Errors
    /// The service account's files cannot be read, the kubeconfig not be written, or another agent keeps working.
    pub fn kubeconfig(&self) -> Result<bool, DiskError> {
        let _lock = self.lock()?;
        self.make_durable()?;
        self.note_durability(self.kubeconfig_locked())
    }

    /// As [`kubeconfig`](Self::kubeconfig), under the lock.
    fn kubeconfig_locked(&self) -> Result<bool, DiskError> {
        let (paths, settings) = (&self.settings.paths, &self.settings.kubeconfig);
        if settings.server.is_empty() {
            return Ok(false);
        }
        let credentials = PluginCredentials::read(self.disk(), paths, settings, &self.token)?;
        let mut has_written = false;
        // The kubeconfig names the token's file, so that comes first.
        if let Some(token) = &credentials.token {
            has_written |= self.text(&paths.token_file(), token, settings.mode)?;
        }
        has_written |= self.text(&paths.kubeconfig(), &credentials.kubeconfig, settings.mode)?;
        Ok(has_written)
    }

    /// Writes a file of ours if its text or mode differs; true if it did.
    fn text(&self, path: &Path, text: &str, mode: u32) -> Result<bool, DiskError> {
        let has_mode = self.disk.stat(path).is_ok_and(|stat| stat.mode == mode);
        if has_mode && context(disk::has_content(self.disk(), path, &mut text.as_bytes()), "compare", path)? {
            return Ok(false);
        }
        disk::replace(self.disk(), path, &mut text.as_bytes(), FileAttributes::Mode(mode))?;
        Ok(true)
    }

    /// What the configuration directory should hold.
    ///
    /// # Errors
    /// The template cannot be read or is invalid.
    pub fn want(&self) -> Result<Want, InstallError> {
        let entry = lock(&self.entry).clone();
        self.want_with(&entry)
    }

    /// The next pass writes this entry.
    pub fn set_entry(&self, entry: EntrySettings) {
        *lock(&self.entry) = entry;
    }

    /// Whether the plugin would take an entry.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn would_accept(&self, entry: &EntrySettings) -> Result<(), String> {
        let want = self.want_with(entry).map_err(|error| error.to_string())?;
        self.accept(&listed(&want.entry)?).map_err(|why| format!("the plugin would reject its entry: {why}"))
    }

    /// The plugin's configuration, as the runtime hands it over, read by the plugin's own parser.
    ///
    /// # Errors
    /// The entry does not exist now, or the plugin would reject it.
    pub fn plugin_conf(&self) -> Result<Conf, String> {
        accepted(&listed(&self.want().map_err(|error| error.to_string())?.entry)?)
    }

    fn want_with(&self, entry: &EntrySettings) -> Result<Want, InstallError> {
        let Settings { paths, kubeconfig, identity, placement, .. } = &self.settings;
        let file = match &entry.template {
            Some(TemplateSource::File(path)) => {
                Some(disk::read_text(self.disk(), path).map_err(InstallError::Conflist)?)
            }
            Some(TemplateSource::Text(_)) | None => None,
        };
        let entry = entry.entry(paths, kubeconfig, &identity.node, file.as_deref());
        let drop_in = match self.settings.install {
            InstallMode::Inline => DropIn::Never,
            InstallMode::Auto | InstallMode::DropIn if self.reader.is_there() => DropIn::Read,
            InstallMode::Auto => DropIn::Offered,
            InstallMode::DropIn => DropIn::Demanded,
        };
        Ok(Want { placement: placement.clone(), entry: entry.map_err(InstallError::Template)?, drop_in })
    }

    fn conflist(&self, want: &Want, left: Option<&str>, pass: &mut Pass) -> Result<(), InstallError> {
        let (directory, stats) = self.directory().map_err(InstallError::Conflist)?;
        let plan = conflist_edits::plan(&directory, want);
        if let Some((file, conf)) = plan.handed(&directory) {
            self.accept(&conf).map_err(|why| InstallError::Refused { file: file.to_owned(), why })?;
        }
        self.note(&plan, &directory);
        let Plan { target, obstacle, edits, list, inlined_because } = plan;
        (pass.list, pass.inlined_because) = (list, inlined_because);
        pass.neighbours = neighbours(&directory, target.as_deref());
        let is_in_front = |name: &str| target.as_deref().is_none_or(|target| name < target);
        let invalid = directory.read().filter(|(name, _)| is_in_front(name));
        pass.invalid =
            invalid.filter_map(|(name, read)| Some((name.to_owned(), read.err()?.to_string()))).collect();
        pass.has_unread_folder = directory.files().iter().any(|file| file.name.ends_with('/'));
        (pass.target, pass.obstacle) = (target, obstacle);
        let is_left = left.is_some() && left == pass.target.as_deref();
        for edit in edits.into_iter().filter(|_| !is_left) {
            if self.edit(&edit, &directory, &stats).map_err(InstallError::Conflist)? {
                pass.edits.push(edit);
            }
        }
        let has_drop_in =
            directory.files().iter().any(|file| file.name.ends_with(&format!("/{FOLDER_FILE}")));
        if has_drop_in && self.owes_nudge.load(Ordering::Relaxed) {
            self.nudge().map_err(InstallError::Conflist)?;
        }
        Ok(())
    }

    /// Has the runtime read the folders of lists again.
    fn nudge(&self) -> Result<(), DiskError> {
        self.owes_nudge.store(true, Ordering::Relaxed);
        disk::nudge(self.disk(), &self.settings.paths.net)?;
        self.owes_nudge.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the configuration directory: files that matter, and what was known of each before it was read.
    ///
    /// # Errors
    /// It cannot be listed, or a file that is ours by its name cannot be read.
    pub fn directory(&self) -> Result<(Directory, BTreeMap<String, Stat>), DiskError> {
        let net = &self.settings.paths.net;
        let names = context(self.disk.list(net), "list", net)?;
        let names: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
        let (mut files, mut stats) = (Vec::new(), BTreeMap::new());
        for name in names.iter().filter(|name| conflist_edits::matters(name)) {
            files.extend(self.file(name.clone(), &mut stats)?);
        }
        let mut folders = Directory::new(files.clone()).folders();
        // One with our plugin, whose list is gone, has to go with us.
        let is_ours = |name: &&String| self.disk.stat(&net.join(name).join(FOLDER_FILE)).is_ok();
        folders.extend(names.iter().filter(|name| !conflist_edits::matters(name)).filter(is_ours).cloned());
        for folder in folders {
            let names = match self.folder(&folder) {
                Ok(names) => names,
                Err(why) => {
                    files.push(File { name: format!("{folder}/"), text: Err(why) });
                    continue;
                }
            };
            let names = names.into_iter().filter_map(|name| name.into_string().ok());
            let names = names.map(|name| format!("{folder}/{name}"));
            for name in names.filter(|name| net_dir::is_in_folder(name, &folder)) {
                files.extend(self.file(name, &mut stats)?);
            }
        }
        Ok((Directory::new(files).at(net.display().to_string()), stats))
    }

    /// The names in a folder of a list; none if it does not exist.
    ///
    /// # Errors
    /// Why the agent does not use it.
    fn folder(&self, name: &str) -> Result<Vec<OsString>, String> {
        let path = self.settings.paths.net.join(name);
        if let Some(target) = self.disk.link(&path) {
            return Err(format!("it is a symbolic link to {}", target.display()));
        }
        match self.disk.list(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            names => names.map_err(|error| error.to_string()),
        }
    }

    /// Reads a file of the configuration directory; none if it is gone, or not a file.
    fn file(&self, name: String, stats: &mut BTreeMap<String, Stat>) -> Result<Option<File>, DiskError> {
        let path = self.settings.paths.net.join(&name);
        let is_network = is_loaded(&name) || name.contains('/');
        let unread = |error: io::Error| disk::unread(self.disk(), &path, &error);
        let stat = match self.disk.stat(&path) {
            Ok(stat) => stat,
            // On the node the link may lead somewhere.
            Err(error) if is_network && self.disk.link(&path).is_some() => {
                return Ok(Some(File { name, text: Err(unread(error)) }));
            }
            // Removed since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if is_network => return Ok(Some(File { name, text: Err(unread(error)) })),
            Err(error) => return context(Err(error), "read", &path),
        };
        if !stat.is_file {
            // A runtime passes over a folder, but not over a link to one.
            let is_link = is_network && self.disk.link(&path).is_some();
            let text = Err(unread(io::ErrorKind::IsADirectory.into()));
            return Ok(is_link.then_some(File { name, text }));
        }
        let text = disk::read_text(self.disk(), &path).map_err(|error| unread(error.error));
        stats.insert(name.clone(), stat);
        Ok(Some(File { name, text }))
    }

    /// Makes a change unless it is made already; true if it did. A file that another program changed since the directory was read
    /// stays as it is.
    pub(crate) fn edit(
        &self,
        edit: &Edit,
        directory: &Directory,
        stats: &BTreeMap<String, Stat>,
    ) -> Result<bool, DiskError> {
        let net = &self.settings.paths.net;
        match edit {
            Edit::Write { name, text, like } => {
                if directory.text(name) == Some(text.as_str()) {
                    return Ok(false);
                }
                let path = net.join(name);
                let still = |_: &Path| match self.disk.stat(&path).ok() {
                    there if there == stats.get(name).copied() => Ok(()),
                    Some(there) if !there.is_file => {
                        Err(io::Error::other("it is not a regular file; move it, and the agent continues"))
                    }
                    Some(_) | None => Err(disk::moved()),
                };
                let own = FileAttributes::Mode(if self.settings.conf_group_read { 0o640 } else { 0o600 });
                let attributes = stats
                    .get(name)
                    .or_else(|| stats.get(like))
                    .map_or(own, |stat| FileAttributes::Like(*stat));
                let Some((folder, file)) = name.split_once('/') else {
                    disk::replace_if(self.disk(), &path, &mut text.as_bytes(), attributes, &still)?;
                    return Ok(true);
                };
                self.owes_nudge.store(true, Ordering::Relaxed);
                let folder = net.join(folder);
                if self.disk.stat(&folder).is_ok() {
                    disk::replace_if(self.disk(), &path, &mut text.as_bytes(), attributes, &still)?;
                } else {
                    let mark = format!(
                        "This folder was made for {PLUGIN_TYPE}, and is removed with it if it is empty.\n"
                    );
                    disk::place_directory(self.disk(), &folder, &[(MARK, &mark), (file, text)], attributes)?;
                }
                self.nudge()?;
                Ok(true)
            }
            Edit::Delete { name } => {
                let path = net.join(name);
                let there = self.disk.stat(&path).ok();
                if there.is_some() && there != stats.get(name).copied() {
                    return context(Err(disk::moved()), "remove", &path);
                }
                disk::remove(self.disk(), &path)?;
                if let Some((folder, _)) = name.split_once('/') {
                    let folder = net.join(folder);
                    if self.disk.stat(&folder.join(MARK)).is_ok() {
                        disk::discard_directory(self.disk(), &folder, MARK)?;
                    }
                    self.nudge()?;
                }
                Ok(there.is_some())
            }
        }
    }

    /// Whether the plugin has a kubeconfig, from any writer.
    pub(crate) fn has_kubeconfig(&self) -> bool {
        let kubeconfig = self.settings.paths.kubeconfig();
        self.disk.stat(&kubeconfig).is_ok_and(|stat| stat.length > 0)
    }

    /// Whether the runtime calls the plugin and the plugin can work, as the node's files are at this moment.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check(&self) -> Result<(), Reason> {
        self.check_binaries()?;
        if !self.has_kubeconfig() {
            return Err(Reason::Missing(self.settings.paths.kubeconfig()));
        }
        let is_said = self.settings.ready_before_called;
        let is_called = |_: &EntryObstacle, was_seen| is_said || was_seen;
        let Some(conf) = self.handed(is_called)? else { return Ok(()) };
        self.ask(conf)
    }

    /// Whether the runtime calls the plugin, and whether that has the credentials it needs. Without them it can be asked nothing.
    ///
    /// # Errors
    /// The reason why the runtime does not call it, or why it could not work with its credentials.
    pub(crate) fn check_once(&self) -> Result<bool, Reason> {
        self.check_binaries()?;
        // Nothing here sees calls: the user who runs this decides.
        let is_called = |obstacle: &EntryObstacle, _| {
            log::warn!(target: SCOPE, "{obstacle}");
            true
        };
        let Some(conf) = self.handed(is_called)? else { return Ok(self.has_kubeconfig()) };
        let reads_manifests = accepted(&conf).is_ok_and(|conf| conf.manifest_dir.is_some());
        let is_equipped = reads_manifests || self.has_kubeconfig();
        if is_equipped {
            self.ask(conf)?;
        }
        Ok(is_equipped)
    }

    fn check_binaries(&self) -> Result<(), Reason> {
        let binaries = lock(&self.compared).clone();
        if binaries.is_empty() {
            return Err(Reason::Starting);
        }
        for (target, (_, compared)) in binaries {
            match self.disk.stat(&target) {
                Ok(now) if now == compared => {}
                Ok(_) => return Err(Reason::Changed(target)),
                Err(_) => return Err(Reason::Missing(target)),
            }
        }
        Ok(())
    }

    /// What the runtime hands to the plugin, accepted by the plugin's own parser; none where no file is to have the entry. `is_called` decides
    /// where the files leave it open, and knows whether a call was seen.
    fn handed(&self, is_called: impl Fn(&EntryObstacle, bool) -> bool) -> Result<Option<String>, Reason> {
        let want = self.want().map_err(|error| Reason::Failed(error.to_string()))?;
        let (directory, _) = self.directory().map_err(|error| Reason::Failed(error.to_string()))?;
        let plan = conflist_edits::plan(&directory, &want);
        let was_seen = self.note(&plan, &directory);
        // Without edits, and with those that concern no pod, this is what the runtime hands to the plugin.
        let handed = plan.handed(&directory).map(|(_, conf)| conf);
        match plan.obstacle {
            Some(obstacle) if obstacle.is_open() && handed.is_some() && is_called(&obstacle, was_seen) => {}
            Some(obstacle) if obstacle.concerns_pods() => return Err(Reason::Directory(obstacle)),
            Some(_) | None => {}
        }
        handed.iter().try_for_each(|conf| self.accept(conf)).map_err(Reason::Failed)?;
        Ok(handed)
    }

    /// Notes what the files leave open; returns whether a runtime has called the plugin since.
    fn note(&self, plan: &Plan, directory: &Directory) -> bool {
        self.calls.note(plan.obstacle.as_ref(), plan.left_open(directory))
    }

    /// Whether the plugin's own parser takes a configuration, and whether it leads to what the agent writes.
    fn accept(&self, conf: &str) -> Result<(), String> {
        let conf = accepted(conf)?;
        let written = self.settings.paths.kubeconfig();
        if conf.manifest_dir.is_none() && conf.kubeconfig != written {
            let (read, written) = (conf.kubeconfig.display(), written.display());
            return Err(format!("it leads to the kubeconfig {read}, and the agent writes {written}"));
        }
        Ok(())
    }

    /// Asks the installed plugin whether it could serve pods, unless it has just confirmed that.
    fn ask(&self, conf: String) -> Result<(), Reason> {
        let paths = &self.settings.paths;
        let binary = paths.bin.join(PLUGIN_TYPE);
        let looked_at = [&binary, &paths.kubeconfig(), &paths.token_file()];
        let files: Vec<Option<Stat>> = looked_at.map(|path| self.disk.stat(path).ok()).into();
        // One at a time: concurrent callers get the same answer.
        let mut asked = lock(&self.asked);
        let is_known =
            |asked: &Asked| asked.conf == conf && asked.files == files && asked.at.elapsed() < ANSWER_HOLDS;
        if asked.as_ref().is_some_and(is_known) {
            return Ok(());
        }
        *asked = None;
        self.plugin.ask(&binary, PluginQuestion::Status(&conf)).map_err(Reason::Plugin)?;
        *asked = Some(Asked { at: Instant::now(), conf, files });
        Ok(())
    }
}

/// Whether an error of fsync(2) on a directory means that no name in it can be lost.
fn is_needless(error: io::ErrorKind) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, ReadOnlyFilesystem, Unsupported};
    [NotFound, ReadOnlyFilesystem, InvalidInput, Unsupported].contains(&error)
}

/// An entry as the runtime hands it over from a list, whose name counts.
fn listed(entry: &PluginEntry) -> Result<String, String> {
    let mut conf: serde_json::Value =
        serde_json::from_str(&entry.standalone()).map_err(|error| error.to_string())?;
    conf["name"] = PLUGIN_TYPE.into();
    Ok(conf.to_string())
}

/// A configuration as the plugin's own parser reads it, or the parser's error.
fn accepted(conf: &str) -> Result<Conf, String> {
    let envelope = Envelope::read(conf.as_bytes(), CniCommand::Add).map_err(|error| error.to_string())?;
    envelope.conf().map_err(|error| error.to_string())
}

/// The name of the file that Istio's agent was writing under this name, such as `istio-cni` for `istio-cni.tmp.2481`.
fn of_istios_agent(half: &str) -> Option<&str> {
    let (name, number) = half.rsplit_once(".tmp.")?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

fn neighbours(directory: &Directory, target: Option<&str>) -> Vec<String> {
    let text = target.and_then(|target| Some((target, directory.text(target)?)));
    let conf = text.and_then(|(name, text)| NetConf::parse(name, text).ok());
    let types = conf.iter().flat_map(|conf| conf.network.types()).filter(|kind| *kind != PLUGIN_TYPE);
    types.map(str::to_owned).collect()
}
