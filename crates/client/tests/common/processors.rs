//! The processors of tests whose threads have to run on certain ones.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Two processors on which this program may run. From now on, this thread and those that it starts use no others.
pub(crate) fn processors() -> Option<[CpuSet; 2]> {
    let all = sched_getaffinity(None).unwrap();
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|number| all.is_set(*number));
    let (mut both, mut each) = (CpuSet::new(), [CpuSet::new(); 2]);
    for one in &mut each {
        let number = allowed.next()?;
        one.set(number);
        both.set(number);
    }
    sched_setaffinity(None, &both).unwrap();
    Some(each)
}
