//! Bugs that are planted on purpose, one at a time, to see that a check finds each: `./test
//! --planted`.
//!
//! A place in the core asks `planted!("name")`, which is `false` and no code without the feature
//! `planted`. Which names there are, what each does and what finds it is in `engine/planted.toml`.

/// True if the bug of this name is planted in this process.
#[cfg(not(feature = "planted"))]
macro_rules! planted {
    ($name:literal) => {
        false
    };
}

/// True if the bug of this name is planted in this process.
#[cfg(feature = "planted")]
macro_rules! planted {
    ($name:literal) => {
        $crate::planted::is($name)
    };
}

/// Where a program or a test reads which bug it is to have; none if it is not set.
#[cfg(feature = "planted")]
pub const VARIABLE: &str = "KVFERRY_PLANTED";

#[cfg(feature = "planted")]
static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();

/// Plants a bug in this process, for good.
///
/// # Panics
/// If there is another one already.
#[cfg(feature = "planted")]
pub fn plant(name: &str) {
    let chosen = CHOSEN.get_or_init(|| name.into());
    assert_eq!(chosen, name, "a bug is planted already");
}

/// Plants the bug that [`VARIABLE`] names, if it names one.
#[cfg(feature = "planted")]
pub fn plant_from_environment() {
    if let Ok(name) = std::env::var(VARIABLE) {
        plant(&name);
    }
}

/// Whether this is the bug that was planted.
#[cfg(feature = "planted")]
pub(crate) fn is(name: &str) -> bool {
    CHOSEN.get().is_some_and(|chosen| chosen == name)
}
